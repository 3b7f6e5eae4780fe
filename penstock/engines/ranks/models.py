"""The models of one rank, and what the commands on them share.

A function of `RankModels` and the command carries out a command (penstock/engines/ranks/serving/handlers.py). All ranks
of a group get the same commands in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import ActorConfig, TrainerConfig
from penstock.data.images import ImageFolder
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.batches.packing import Rows
from penstock.engines.batches.shares import ALONE, RankSet
from penstock.engines.commands.finetuning import Step
from penstock.engines.commands.rollout import PartialResults
from penstock.engines.families.attention import needs_flex
from penstock.engines.families.fp8 import refuse_device
from penstock.engines.families.shape import ModelShape, read_settings
from penstock.engines.kernels.attention_kernel import choose_attention
from penstock.engines.kernels.flash_attention import on_hopper
from penstock.engines.kernels.float32 import multiply_exactly
from penstock.engines.kernels.fp8_blocks import Fp8Blocks
from penstock.engines.kernels.lm_head import Head
from penstock.engines.kernels.sequence_parallel import ranks_together
from penstock.engines.models.expert_parallel import cut_experts
from penstock.engines.models.host_activations import HostActivations, keep_on_host
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import compile_blocks
from penstock.engines.rollout.engine import Generator
from penstock.engines.rollout.environments.host import EnvironmentHost
from penstock.engines.training.portions import Portions
from penstock.engines.training.slot_writer import SlotWriter
from penstock.engines.training.trainer import Trainer
from penstock.engines.weights.lora import attach, lay_fused_together
from penstock.engines.weights.strategy import Transfer

CountedModel = Literal["actor", "critic", "reference", "preference"]  # those whose passes usage counts
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _unheard(_: PartialResults | Step) -> None:
    """Take news that nobody waits for."""


class NewestCommand(threading.local):
    """What the newest command of a thread tells and did.

    Attributes:
        tell: takes what it tells ahead of its reply.
        usage: what it did: tokens, FLOPs, seconds of collectives.
    """

    def __init__(self) -> None:
        self.tell: Callable[[PartialResults | Step], None] = _unheard
        self.usage: dict[str, float] = {}


@dataclass
class RankModels:
    """What one rank holds.

    Attributes:
        rank: this rank's number in the group.
        world_size: ranks in the group.
        trainers: the models that are trained, by name: a role, "critic/AGENT", "sft" or "preference".
        frozen: the others, by role.
        lm: the model inside the actor's trainer; in a rollout group of its own its shapes alone.
        generator: the rollout engine.
        transfer: brings the actor's weights to the rollout engine.
        slots: copies the trained state to memory of the host, once that was asked for.
        storage: parameters that actor and rollout engine share.
        store: where the groups of actor and rollout meet, if they are two.
        verified_version: policy version of the rollout engine's weights, wherever it is; -1: none.
        updated_since: the actor of this group has stepped since.
        portions: of an iteration, whose gradient the actor's trainer has summed.
        reference_refreshed: the reference is no longer the starting model.
        reference_head: language head of a reference in another group (penstock/engines/ranks/reference.py).
        reference_fp8: what it computes with where the actor computes in FP8.
        images: that rows name.
        newest: what the newest command tells and did.
        host_activations: of the trained models whose blocks keep their inputs in host memory.
    """

    rank: int
    world_size: int
    device: torch.device
    config: TrainConfig = field(default_factory=TrainConfig)
    shapes: dict[CountedModel, ModelShape] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    lm: Any = None
    sft_rows: Rows | None = None
    tokenizers: dict[str, Any] = field(default_factory=dict)
    generator: Generator | None = None
    environments: EnvironmentHost = field(default_factory=EnvironmentHost)
    transfer: Transfer | None = None
    slots: SlotWriter | None = None
    storage: dict[str, torch.Tensor] = field(default_factory=dict)
    store: Any = None
    verified_version: int = -1
    updated_since: bool = False
    portions: Portions = field(default_factory=Portions)
    reference_refreshed: bool = False
    reference_head: Head | None = None
    reference_fp8: Fp8Blocks | None = None
    images: ImageFolder | None = None
    newest: NewestCommand = field(default_factory=NewestCommand)
    host_activations: list[HostActivations] = field(default_factory=list)

    def configure(self, config: TrainConfig) -> None:
        """Take over the configuration, before a model is loaded.

        Raises:
            UserError: this rank cannot have the kernel of attention that it names, or compute in FP8.
        """
        choose_attention(config.model.attention, self.device.type)
        if config.in_fp8 and self.device.type == "cuda" and not on_hopper():
            refuse_device(config, torch.cuda.get_device_name())
        self.config = config
        if self.device.type == "cuda" and self.dtype == torch.float32:
            multiply_exactly()

    def see(self, images: str | None, folder: str) -> None:
        """Open the images that rows name, if there are any; `folder` is that of the model."""
        if images is not None:
            self.images = ImageFolder(Path(images), folder)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights in training and rollout."""
        if self.config.model.dtype != "auto":
            return DTYPES[self.config.model.dtype]
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def needs_flex(self, folder: str) -> bool:
        """Whether FlexAttention alone computes the model of a folder, on a GPU."""
        return self.dtype == torch.float32 or bool(needs_flex(read_settings(Path(folder))))

    def causal_lm(self, folder: str, config: TrainerConfig) -> Any:
        """Load a causal language model that is to be trained."""
        settings = self.config.model
        recomputes = bool(config.gradient_checkpointing)
        return self.to_train(
            load_causal_lm(folder, self.dtype, recomputes, settings.code, settings.train_encoder), config
        )

    def loaded(self, folder: str) -> Any:
        """Load a causal language model that is not trained."""
        return load_causal_lm(folder, self.dtype, False, self.config.model.code)

    def to_train(self, lm: Any, config: TrainerConfig) -> Any:
        """Give a model the adapters that are asked for, compile its blocks where that pays, put it on the device."""
        if config.lora is not None:
            attach(lm, config.lora, self.config.seed)
        if isinstance(config, ActorConfig) and config.expert_parallel > 1:
            cut_experts(lm, ranks_together(config.expert_parallel))
        if config.offload_activations:
            self.host_activations.append(keep_on_host(lm))
        if config.zero_stage < 3:  # compiled code would not wait for DeepSpeed to gather the shards
            self.compiled(lm)
        if config.offload == "nothing":  # else its shards alone go there, from host memory
            lm.to(self.device)
        lay_fused_together(lm)
        return lm

    def compiled(self, lm: Any) -> Any:
        """Compile a model's blocks, on a GPU."""
        if self.device.type == "cuda":
            compile_blocks(lm)
        return lm

    def model(self, name: str) -> nn.Module:
        """Return the model of a name, ready for a pass without gradients."""
        if name == "reference" and self.reference_fp8 is not None:  # it may have been refreshed or restored
            self.reference_fp8.renew()
        if name in self.frozen:
            return self.frozen[name]
        engine = self.trainers[name].engine
        engine.eval()
        return engine

    def in_fp8(self, role: CountedModel) -> bool:
        """Whether a model's blocks compute in FP8."""
        if role == "reference":
            return self.reference_fp8 is not None
        return role == "actor" and role in self.trainers and self.config.actor.fp8

    def ranks_of(self, role: CountedModel) -> RankSet:
        """Return the ranks that compute micro-batches of a role together; a reference follows the actor beside it."""
        wanted = "actor" if role == "reference" else role
        return next((one.ranks for name, one in self.trainers.items() if name.partition("/")[0] == wanted), ALONE)

    def tokenizer(self, folder: str) -> Any:
        """Return the tokenizer of a model folder, read once."""
        if folder not in self.tokenizers:
            self.tokenizers[folder] = load_tokenizer(folder, self.config.model.code)
        return self.tokenizers[folder]

    @property
    def generates(self) -> bool:
        """Whether this rank has a generation under way."""
        return self.generator is not None and self.generator.loop.busy

    def rollout_engine(self) -> Generator:
        """Return this rank's rollout engine.

        Raises:
            RuntimeError: it has no verified weights of the actor.
        """
        assert self.generator is not None
        if self.verified_version < 0 or self.updated_since:
            raise RuntimeError("the rollout engine has no verified weights of the actor: a reshard comes first")
        return self.generator

    def await_snapshot(self) -> None:
        """Wait until the snapshot that is being taken is whole, if there is one: what it copies may change then."""
        if self.slots is not None:
            self.slots.wait()

    def use(self, work: Mapping[str, float]) -> None:
        """Add to what the newest command did."""
        usage = self.newest.usage
        for name, value in work.items():
            usage[name] = usage.get(name, 0.0) + value
