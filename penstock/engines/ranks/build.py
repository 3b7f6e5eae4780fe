"""Makes and loads the models of a rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import nn

from penstock.configs.evaluation import EvaluationConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.build import Build, BuildFrozen, Built, MakeTiny
from penstock.engines.families.shape import read_shape
from penstock.engines.families.tiny import SPECIAL
from penstock.engines.groups.placement import reference_is_base, reshard_strategy
from penstock.engines.kernels.attention_kernel import kernels_on
from penstock.engines.kernels.fp8_blocks import compute_in_fp8
from penstock.engines.kernels.sequence_parallel import ranks_together
from penstock.engines.models.loading import causal_lm_shapes, load_reward_model
from penstock.engines.models.models import PackedPolicy, PackedRewardModel
from penstock.engines.models.tiny import make_tiny_model
from penstock.engines.ranks.critic import build_critics
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.reference import keep_head
from penstock.engines.ranks.reshard import bring_weights, shared_and_copied
from penstock.engines.ranks.serving.handlers import carries_out
from penstock.engines.rollout.engine import Demand, Generator, Served
from penstock.engines.training.trainer import Trainer
from penstock.engines.weights.experts import whole_shape
from penstock.engines.weights.folder import FolderLoad
from penstock.engines.weights.layout import ordered_parameters
from penstock.engines.weights.strategy import shared_storage, transfer_within_group

_log = logging.getLogger(__name__)


@carries_out(MakeTiny)
def make_tiny(models: RankModels, command: MakeTiny) -> None:
    """Make a tiny model's folder; rank 0 writes it."""
    config, folder = TrainConfig.model_validate(command.config), Path(command.folder)
    if models.rank == 0 and config.model.tiny is not None:
        tokenizer = models.tokenizer(command.folder)
        ends = tokenizer.eos_token_id, tokenizer.pad_token_id
        special = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
        seen = special if config.model.tiny.encoder is not None else None
        make_tiny_model(folder, config.model.tiny, len(tokenizer), *ends, config.seed, seen)
    torch.distributed.barrier()


@carries_out(Build)
def build(models: RankModels, command: Build) -> Built:
    """Load the models one after the other; a rollout engine of the same group comes last."""
    config, folder, roles = TrainConfig.model_validate(command.config), command.folder, command.roles
    models.configure(config)
    models.see(command.images, folder)
    critic_folder = (config.critic.path if config.critic is not None else None) or folder
    models.shapes = dict.fromkeys(("actor", "reference"), read_shape(Path(folder)))
    models.shapes["critic"] = read_shape(Path(critic_folder))
    steps = config.iterations * config.algorithm.mini_batches * config.algorithm.epochs
    parameters = trained = 0
    if "actor" in roles:
        parameters, trained = _build_actor(models, command, steps)
    if "critic" in roles and config.critic is not None:
        build_critics(models, critic_folder, config.agents, steps)
    if "reference" in roles and not reference_is_base(config, roles):
        models.frozen["reference"] = _frozen_policy(models, folder)
        if config.actor.fp8:  # as the actor, so that their log-probs differ by the weights alone
            models.reference_fp8 = compute_in_fp8(models.frozen["reference"])
    return _build_rest(models, command, parameters, trained)


@carries_out(BuildFrozen)
def build_frozen(models: RankModels, command: BuildFrozen) -> Built:
    """Load the models one after the other, none of them to be trained; the rollout engine comes last."""
    config, roles = EvaluationConfig.model_validate(command.config), command.roles
    models.configure(config)
    models.see(command.images, command.folder)
    models.shapes = {"actor": read_shape(Path(command.folder))}
    if "actor" in roles:
        models.frozen["actor"] = _frozen_policy(models, command.folder)
    if "reference" in roles:
        models.shapes["reference"] = read_shape(Path(str(config.reference)))
        models.frozen["reference"] = _frozen_policy(models, str(config.reference))
    return _build_rest(models, command, models.shapes["actor"].parameters, 0)


def _build_rest(models: RankModels, command: Build | BuildFrozen, parameters: int, trained: int) -> Built:
    """Load what is never trained, a rollout engine last."""
    config, roles = models.config, command.roles
    if "reward" in roles:
        reward_model = models.compiled(load_reward_model(str(config.reward.model), models.dtype, config.model.code))
        models.frozen["reward"] = _freeze(PackedRewardModel(reward_model), models.device)
    if "rollout" in roles:
        with _timed("starting the rollout engine"):
            _build_rollout(models, command)
    strategy = reshard_strategy(config) if "rollout" in roles else None
    kernels = kernels_on(models.device.type, models.needs_flex(command.folder))
    return Built(parameters, trained, *shared_and_copied(models), strategy, kernels)


def _frozen_policy(models: RankModels, folder: str) -> nn.Module:
    """Load a language model for forward passes alone."""
    return _freeze(PackedPolicy(models.compiled(models.loaded(folder)), images=models.images), models.device)


def _build_actor(models: RankModels, command: Build, steps: int) -> tuple[int, int]:
    """Load the actor into DeepSpeed; return how many parameters it has, and how many of them are trained."""
    config = models.config.actor
    with _timed("loading the actor"):
        models.lm = models.causal_lm(command.folder, config)
    parameters = sum(prod(whole_shape(parameter)) for parameter in models.lm.parameters())
    trained = sum(prod(whole_shape(parameter)) for parameter in ordered_parameters(models.lm))
    with _timed("starting DeepSpeed"):
        policy = PackedPolicy(models.lm, command.keep_logits, config.replays, models.images)
        models.trainers["actor"] = Trainer(
            policy,
            ordered_parameters(models.lm),
            config,
            steps,
            stops_at=models.config.faults.stops_at,
            ranks=ranks_together(config.sequence_parallel),
            fp8=config.fp8,
        )
    if "reference" not in command.roles:
        keep_head(models)
    return parameters, trained


def _build_rollout(models: RankModels, command: Build | BuildFrozen) -> None:
    """Start the rollout engine, on the actor's weights if they are in this group."""
    config, rollout, folder = models.config, models.config.rollout, Path(command.folder)
    strategy = reshard_strategy(config)
    if strategy in ("broadcast", "folder"):
        models.lm = causal_lm_shapes(folder, models.dtype, config.model.code)
    models.storage = shared_storage(strategy, models.lm, rollout.tensor_parallel, models.dtype, models.device)
    correction = config.algorithm.correction is not None
    sleeps = command.roles != ("rollout",)
    demand = Demand(rollout, config.data.max_prompt_tokens, command.engines, sleeps, correction, config.actor.replays)
    looks = models.images, config.model.train_encoder
    served = Served(folder, models.lm, models.dtype, models.storage, config.model.code, *looks)
    generator = Generator(served, demand)
    models.generator = generator
    if strategy == "broadcast":
        return
    if strategy == "folder":  # not made again when the engine wakes: it keeps its weights in the host's memory
        read = partial(models.loaded, str(folder))
        models.transfer = FolderLoad(generator.model, generator.binding, read, models.storage)
    else:
        models.transfer = transfer_within_group(strategy, generator.model, generator.binding, models.lm)
        generator.own_reshard = models.transfer
    bring_weights(models, 0)
    generator.sleep()


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Write to this rank's log how long the block took."""
    began = time.perf_counter()
    yield
    _log.info("%s: %.1f s", what, time.perf_counter() - began)


def _freeze(module: nn.Module, device: torch.device) -> nn.Module:
    return module.requires_grad_(False).eval().to(device)
