"""What one rank does: it holds the models of its roles and carries out commands on them.

The rank loop (engines/groups/rank.py) receives a command and calls `Worker.handle`; each command is one method here,
takes plain values and arrays, and returns the same. All ranks of a group get the same commands in the same order.

Left out: when to do what (flows/), how commands travel (engines/groups/channel.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import AutoTokenizer

from configs.schema import TrainConfig
from configs.sections.trainer import TrainerConfig
from engines.batches.micro_batches import plan_micro_batches
from engines.batches.packing import PackedBatch, Rows, pack, read_rows
from engines.families.shape import ModelShape, read_shape
from engines.groups import interface
from engines.groups.channel import Tell
from engines.groups.placement import reference_is_base, reshard_strategy
from engines.kernels.attention_kernel import kernel_figures
from engines.models.loading import causal_lm_shapes, load_causal_lm, load_reward_model, write_model
from engines.models.models import PackedPolicy, PackedRewardModel, compile_blocks
from engines.models.tiny import make_tiny_model
from engines.ranks import critic as critics
from engines.ranks import finetuning, logprob_gap, reference
from engines.ranks import start as ranks_start
from engines.ranks.start import generator_states, restore_generators
from engines.ranks.usage import begin_usage
from engines.rollout.announcing import Announcer
from engines.rollout.decode_loop import Sampling
from engines.rollout.detokenize import decode
from engines.rollout.engine import Generator
from engines.rollout.episodes import EnvironmentHost, Played, episode_columns
from engines.sizing.flops import forward_flops, training_flops
from engines.training import full_kl
from engines.training.collective_times import timed_collectives
from engines.training.state_files import read_state
from engines.training.trainer import Trainer
from engines.training.updates import ActorLoss, Split, update_actor
from engines.weights.broadcast import Receiver, Sender
from engines.weights.joint import join
from engines.weights.layout import ordered_parameters
from engines.weights.lora import attach, lay_fused_together, without_adapters
from engines.weights.strategy import Transfer, shared_storage, transfer_within_group
from penstock.base.ragged import Ragged
from penstock.state.experience import column_names

COMMANDS = (
    finetuning.COMMANDS | reference.COMMANDS | critics.COMMANDS | logprob_gap.COMMANDS
)  # those that are functions of a worker
_log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Worker:
    """The models of one rank.

    Args:
        rank: this rank's number in the group.
        world_size: ranks in the group.
        gpu: index among the group's visible GPUs; None on a machine without one.
    """

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        ranks_start.settle_vector_functions()
        if gpu is None:
            ranks_start.prepare_deepspeed_for_cpu()
        else:
            torch.cuda.set_device(gpu)
        # By hand and without device_id: DeepSpeed's own call binds the group to a device, which hangs vLLM's groups.
        interface.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
        self.trainers: dict[str, Trainer] = {}
        self.frozen: dict[str, nn.Module] = {}
        self.generator: Generator | None = None
        self.generations = 0  # of this process, whichever engine made them; the same on all ranks
        self.environments = EnvironmentHost()
        self.tokenizers: dict[str, Any] = {}
        self.shapes: dict[str, ModelShape] = {}
        self.transfer: Transfer | None = None
        self.storage: dict[str, torch.Tensor] = {}
        self.store: Any = None
        self.verified_version = -1  # of the rollout engine's weights, wherever it is
        self.updated_since = False  # the actor of this group has stepped since
        self.reference_refreshed = False  # it is no longer the starting model
        self.reference_head: torch.Tensor | None = None  # of a reference in another group (engines/ranks/reference.py)
        self.config = TrainConfig()
        self.lm: Any = None
        self.sft_rows: Rows | None = None

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out one command; the reply's `usage` is what it took (engines/ranks/usage.py) and what it did.

        `tell` takes news of it, which only generations have.

        Raises:
            KeyError: there is no such command.
        """
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            **{name: partial(command, self) for name, command in COMMANDS.items()},
            "make_tiny": self.make_tiny,
            "build": self.build,
            "generate": partial(self.generate, tell),
            "score": self.score,
            "logprobs": self.logprobs,
            "update_actor": self.update_actor,
            "listen": self.listen,
            "connect": self.connect,
            "reshard": self.reshard,
            "save": self.save,
            "load": self.load,
            "export": self.export,
        }
        end_usage = begin_usage(self.device)
        sleeps = self.generator is not None and command not in ("generate", "sample_to_compare")
        reply = commands[command](**arguments)
        asleep = self.generator.asleep if self.generator is not None and sleeps else ()
        return reply | {"usage": reply.get("usage", {}) | end_usage(asleep)}

    def after_reply(self) -> None:
        """Let a rollout engine that has generated sleep."""
        if self.generator is not None:
            self.generator.sleep()

    def close(self) -> None:
        """End the rollout engine, which leaves the process group itself, or leave the group."""
        self.environments.close()
        if self.generator is not None:
            self.generator.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def make_tiny(self, config: dict[str, Any], folder: str) -> dict[str, Any]:
        """Make a tiny random model beside the tokenizer in `folder` (rank 0 writes)."""
        settings = TrainConfig.model_validate(config)
        if self.rank == 0 and settings.model.tiny is not None:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            make_tiny_model(
                Path(folder),
                settings.model.tiny,
                len(tokenizer),
                tokenizer.eos_token_id,
                tokenizer.pad_token_id,
                settings.seed,
            )
        torch.distributed.barrier()
        return {}

    # ---- models ----------------------------------------------------------------------------------------------------

    def build(self, config: dict[str, Any], folder: str, roles: list[str], keep_logits: bool = False) -> dict[str, Any]:
        """Load the models of `roles` from the actor's starting folder; return parameter counts and kernels.

        `keep_logits`: the actor's updates hold a micro-batch's logits for the backward pass.
        """
        self.config = TrainConfig.model_validate(config)
        reply: dict[str, Any] = {"parameters": 0, "trained": 0, "parameters_shared": 0, "parameters_copied": 0}
        reply |= kernel_figures(self.device.type)
        critic_folder = (self.config.critic.path if self.config.critic is not None else None) or folder
        self.shapes = dict.fromkeys(("actor", "reference"), read_shape(Path(folder)))
        self.shapes["critic"] = read_shape(Path(critic_folder))
        steps = self.config.iterations * self.config.algorithm.mini_batches * self.config.algorithm.epochs
        if "actor" in roles:
            with _timed("loading the actor"):
                self.lm = self.causal_lm(folder, self.config.actor)
            reply["parameters"] = sum(parameter.numel() for parameter in self.lm.parameters())
            reply["trained"] = sum(parameter.numel() for parameter in ordered_parameters(self.lm))
            with _timed("starting DeepSpeed"):
                self.trainers["actor"] = Trainer(
                    PackedPolicy(self.lm, keep_logits), ordered_parameters(self.lm), self.config.actor, steps
                )
            if "reference" not in roles:
                reference.keep_head(self)
        if "critic" in roles and self.config.critic is not None:
            critics.build_critics(self, critic_folder, self.config.agents, steps)
        if "reference" in roles and not reference_is_base(self.config, roles):
            self.frozen["reference"] = _freeze(
                PackedPolicy(self._compile(load_causal_lm(folder, self.dtype, False))), self.device
            )
        if "reward" in roles:
            reward_model = load_reward_model(str(self.config.reward.model), self.dtype)
            self.frozen["reward"] = _freeze(PackedRewardModel(self._compile(reward_model)), self.device)
        if "rollout" in roles:
            with _timed("starting the rollout engine"):
                self._build_rollout(Path(folder), alone=roles == ["rollout"])
            reply |= self._reshard_figures()
        return reply

    def _build_rollout(self, folder: Path, alone: bool) -> None:
        """Start the rollout engine, on the actor's weights if they are in this group."""
        strategy, rollout = reshard_strategy(self.config), self.config.rollout
        if strategy == "broadcast":
            self.lm = causal_lm_shapes(folder, self.dtype)
        self.storage = shared_storage(strategy, self.lm, rollout.tensor_parallel, self.dtype, self.device)
        limit = self.config.data.max_prompt_tokens
        options = {"sleeps": not alone, "logprobs": self.config.algorithm.correction is not None}
        generator = Generator(folder, self.lm, self.dtype, rollout, limit, self.storage, **options)
        self.generator = generator
        if strategy == "broadcast":
            return
        self.transfer = transfer_within_group(strategy, generator.model, generator.binding, self.lm)
        generator.refill = self.transfer
        self.reshard(0)
        generator.sleep()

    @property
    def dtype(self) -> torch.dtype:
        """Of weights in training and rollout."""
        if self.config.model.dtype != "auto":
            return DTYPES[self.config.model.dtype]
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def causal_lm(self, folder: str, config: TrainerConfig) -> Any:
        """Load a causal language model that is to be trained."""
        return self.to_train(load_causal_lm(folder, self.dtype, bool(config.gradient_checkpointing)), config)

    def to_train(self, lm: Any, config: TrainerConfig) -> Any:
        """Give a model the adapters that are asked for, compile its blocks where that pays, put it on the device."""
        if config.lora is not None:
            attach(lm, config.lora, self.config.seed)
        if config.zero_stage < 3:  # compiled code would not wait for DeepSpeed to gather the shards
            self._compile(lm)
        lm.to(self.device)
        lay_fused_together(lm)
        return lm

    def _compile(self, lm: Any) -> Any:
        if self.device.type == "cuda":
            compile_blocks(lm)
        return lm

    # ---- rollout ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        tell: Tell,
        prompts: np.ndarray,
        offsets: np.ndarray,
        sampling: dict[str, Any],
        tokenizer: str,
        episodes: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Generate responses to those of the group's prompts that fall to this rank's engine.

        `sampling` holds the fields of `Sampling`; `episodes`, for play with an environment, the prompt table and the
        prompts' ids in it. Of an engine's ranks the first replies, the others return nothing. `tell` gets positions,
        samples and texts of responses that end before others.
        """
        generator, environments = self.rollout_engine(), None
        if episodes is not None and self.config.environment is not None:
            environments = self.environments.open(self.config.environment, self._tokenizer(tokenizer), **episodes)
        speaks = not generator.place.rank_in_engine
        announcer = Announcer(partial(decode, self._tokenizer(tokenizer)), tell)
        generated = generator.generate(
            Ragged(prompts, offsets),
            Sampling(**sampling),
            self.next_generation(),
            environments,
            announcer if speaks else None,
        )
        if not speaks:
            return {}
        responses = generated.responses
        return {
            "positions": generated.positions_P,
            "tokens": responses.values_T,
            "offsets": responses.offsets_B1,
            "logprobs": generated.logprobs_T,
            "truncated": generated.truncated_B,
            "texts": pa.array(announcer.texts(responses), pa.large_string()),
            "policy_version": self.verified_version,
            "request_seconds": generated.seconds_B,
            "engine_seconds": generated.seconds,
            "wake_seconds": generator.wake_seconds,
            "prompt_tokens": generated.prompt_tokens,
            "cached_tokens": generated.cached_tokens,
            **(episode_columns(generated) if isinstance(generated, Played) else {}),
        }

    def rollout_engine(self) -> Generator:
        """Return this rank's rollout engine.

        Raises:
            RuntimeError: it has no verified weights of the actor.
        """
        assert self.generator is not None
        if self.verified_version < 0 or self.updated_since:
            raise RuntimeError("the rollout engine has no verified weights of the actor: a reshard comes first")
        return self.generator

    def next_generation(self) -> int:
        """Return a number that no other generation of this process has; the same on all ranks."""
        self.generations += 1
        return self.generations

    def _tokenizer(self, folder: str) -> Any:
        if folder not in self.tokenizers:
            self.tokenizers[folder] = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        return self.tokenizers[folder]

    # ---- reshard ---------------------------------------------------------------------------------------------------

    def listen(self) -> dict[str, Any]:
        """Open the store in which actor and rollout group of different devices meet (rank 0); return its port."""
        if self.rank:
            return {}
        self.store, port = interface.open_store(timedelta(seconds=self.config.engine.start_timeout_s))
        return {"port": port}

    def connect(self, port: int, rollout_ranks: int) -> dict[str, Any]:
        """Join the actor's first rank with all rollout ranks; both groups get this command side by side."""
        start, size = timedelta(seconds=self.config.engine.start_timeout_s), rollout_ranks + 1
        place = (size, self.device, self.lm, self.config.engine.command_timeout_s)
        if self.generator is None:
            self.transfer = Sender(self.lm, None if self.rank else join(self.store, 0, *place))
            return {}
        joint = join(interface.connect_store(port, start), self.rank + 1, *place)
        self.transfer = Receiver(self.generator.model, self.generator.binding, self.lm, self.storage, joint)
        return {}

    def reshard(self, version: int) -> dict[str, Any]:
        """Bring the actor's weights of `version` to the rollout engine, verified; return what it took on this rank.

        Raises:
            RuntimeError: a parameter of the rollout engine is not the actor's afterwards.
        """
        assert self.transfer is not None
        begin = time.perf_counter()
        moved = self.transfer() if self.generator is None else self.generator.reshard(self.transfer)
        self.verified_version, self.updated_since = version, False
        return self._reshard_figures() | {"bytes": moved, "transfer_s": time.perf_counter() - begin}

    def _reshard_figures(self) -> dict[str, Any]:
        """The strategy, and how many of the rollout engine's parameters are the actor's own or have to be written."""
        figures: dict[str, Any] = {"strategy": reshard_strategy(self.config)}
        if self.generator is None:
            return figures
        shared, copied = len(self.generator.binding.shared), len(self.generator.binding.copied)
        if figures["strategy"] == "broadcast":  # shared with this rank's buffer of what the actor sends
            shared, copied = 0, shared + copied
        return figures | {"parameters_shared": shared, "parameters_copied": copied}

    # ---- forward passes --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, path: str, role: str, temperature: float, budget: int) -> dict[str, Any]:
        """Log-probs of response tokens under the actor or the reference, for this rank's share of rows."""
        base = role == "reference" and role not in self.frozen
        policy = self.model("actor" if base else role)
        with without_adapters(self.lm) if base else nullcontext():
            return self.per_token(read_rows(path), role, budget, lambda batch: policy(batch, temperature)[0])

    def model(self, role: str) -> nn.Module:
        """The model of a role, ready for a pass without gradients."""
        if role in self.frozen:
            return self.frozen[role]
        engine = self.trainers[role].engine
        engine.eval()
        return engine

    def per_token(
        self, rows: Rows, role: str, budget: int, forward: Callable[[PackedBatch], torch.Tensor]
    ) -> dict[str, Any]:
        """Values of response tokens by `forward`, for this rank's share of rows."""
        plan = plan_micro_batches(rows, self.world_size, budget)[self.rank]
        parts = [forward(pack(rows, index, self.device)) for index in plan]
        kept = [part for part, index in zip(parts, plan, strict=True) if index]
        values = torch.cat(kept).float().cpu().numpy() if kept else np.empty(0, np.float32)
        order = np.asarray([row for index in plan for row in index], dtype=np.int64)
        return {"rows": order, "values": values, "usage": self._work(rows, role, epochs=0)}

    def _work(self, rows: Rows, role: str, epochs: int) -> dict[str, float]:
        """Tokens and model FLOPs of all ranks: of `epochs` passes of training, or of one forward pass for 0."""
        shape, prompt_B, response_B = self.shapes[role], rows.prompts.lengths_B, rows.responses.lengths_B
        work = {"tokens": float(rows.lengths_B.sum() * max(1, epochs))}
        if not shape.dense:
            return work
        trainer = {"actor": self.config.actor, "critic": self.config.critic}.get(role)
        adapters = shape.adapter_parameters(trainer.lora) if trainer is not None else 0
        count, times = (training_flops, epochs) if epochs else (forward_flops, 1)
        ids_B, scalar = rows.prompt_ids_B, role == "critic"
        settings: dict[str, Any] = {"scalar_head": scalar, "prompt_ids_B": ids_B, "adapters": adapters}
        return work | {"flops": times * count(shape, prompt_B, response_B, **settings)}

    @torch.no_grad()
    def score(self, texts: list[str], budget: int) -> dict[str, Any]:
        """Scores of the reward model for this rank's texts, in order."""
        if not texts:
            return {"scores": np.empty(0, np.float32)}
        tokenizer = self._tokenizer(str(self.config.reward.model))
        tokens = Ragged.of([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], np.int32)
        nothing = Ragged(np.empty(0, np.int32), np.zeros(len(texts) + 1, np.int64))
        rows = Rows(tokens, nothing, nothing, {})
        (plan,) = plan_micro_batches(rows, 1, budget)
        parts = [self.frozen["reward"](pack(rows, index, self.device)) for index in plan]
        scores = np.empty(len(texts), np.float32)
        # To the host once: a copy for each part would make the device wait.
        scores[[row for index in plan for row in index]] = torch.cat(parts).cpu().numpy()
        return {"scores": scores}

    # ---- updates ---------------------------------------------------------------------------------------------------

    def update_actor(
        self,
        path: str,
        version: int,
        split: dict[str, Any],
        loss: dict[str, Any],
        learning_rate: float,
        states: str | None = None,
    ) -> dict[str, Any]:
        """Train the actor on experience generated by the verified policy `version`.

        `states` names the file of `reference_states`, for a KL over the vocabulary.

        Raises:
            RuntimeError: the experience comes from a version that no reshard has verified here.
        """
        if version != self.verified_version:
            raise RuntimeError(
                f"experience of policy version {version}; verified is {self.verified_version}: not trained on it"
            )
        present = column_names(path)
        optional = ("logprobs_old", "logprobs_reference", "logprobs_rollout")
        wanted = ("advantages", *(name for name in optional if name in present))
        rows, head = read_rows(path, wanted), None
        if states is not None:
            rows, head = full_kl.with_states(rows, states), reference.head_of_reference(self)
        plan, trainer, self.updated_since = Split(**split), self.trainers["actor"], True
        update = partial(update_actor, trainer, rows, plan, ActorLoss(**loss), learning_rate, head)
        return self.measured(rows, "actor", trainer, plan, update)

    def measured(
        self, rows: Rows, role: str, trainer: Trainer, plan: Split, update: Callable[[], dict[str, float]]
    ) -> dict[str, Any]:
        """Run an update on `rows`, and count the steps it skips; with several ranks, take its collectives' time."""
        usage, before = self._work(rows, role, plan.epochs), trainer.skipped
        timing = timed_collectives(self.device) if self.world_size > 1 else nullcontext()
        with timing as times, trainer.states_on_device():
            metrics = update()
        if times is not None:
            usage["communication_s"] = times.seconds()
        return {**metrics, "skipped_steps": float(trainer.skipped - before), "usage": usage}

    # ---- state -----------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> dict[str, Any]:
        """Write every trained model of this group, and this rank's generators, under `folder`."""
        for role, trainer in self.trainers.items():
            trainer.save(Path(folder) / role)
        reference.save_reference(self, Path(folder))
        torch.save(generator_states(), Path(folder) / f"random-{os.environ['PENSTOCK_GROUP']}-{self.rank}.pt")
        return {}

    def load(self, folder: str, version: int) -> dict[str, Any]:
        """Restore what `save` wrote, and bring a rollout engine of this group to it."""
        for role, trainer in self.trainers.items():
            trainer.load(Path(folder) / role)
        states = read_state(Path(folder) / f"random-{os.environ['PENSTOCK_GROUP']}-{self.rank}.pt")
        restore_generators(states)
        reference.load_reference(self, Path(folder))
        if self.generator is not None and "actor" in self.trainers:
            self.reshard(version)
        return {}

    def export(self, folder: str) -> dict[str, Any]:
        """Write the actor as a Hugging Face folder (rank 0 writes, all ranks gather)."""
        write_model(self.lm, Path(folder), self.rank)
        return {}


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Write to this rank's log how long the block took."""
    began = time.perf_counter()
    yield
    _log.info("%s: %.1f s", what, time.perf_counter() - began)


def _freeze(module: nn.Module, device: torch.device) -> nn.Module:
    return module.requires_grad_(False).eval().to(device)
