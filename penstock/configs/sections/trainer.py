"""Sections of what is trained: actor, critic, supervised training, with their adapters (optimizers: optimizer.py)."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.configs.sections.optimizer import OptimizerConfig
from penstock.configs.tree.schedule import ScheduledAboveZero
from penstock.configs.tree.section import PositiveInt, Section

GROUPED_RANK = 8  # numbers of bfloat16 in the 16 bytes that grouped products read at once


class LoraConfig(Section):
    """Adapters beside the matrices W: y = W x + alpha / rank x B A x. W rests, A and B are trained."""

    rank: PositiveInt = Field(32, description="rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    targets: list[str] | None = Field(
        None, min_length=1, description="linear layers by name, e.g. [q_proj, v_proj]; null: all in the blocks"
    )
    experts: bool = Field(
        False,
        description="also adapters beside every expert of a mixture, a pair of A and B each; a 'rank' that is a "
        f"multiple of {GROUPED_RANK}",
    )

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.experts and self.rank % GROUPED_RANK:
            raise ValueError(
                f"'rank' {self.rank} does not go with 'experts': the products of all experts' adapters read 16 bytes "
                f"at a time, so it has to be a multiple of {GROUPED_RANK}"
            )
        return self

    @model_validator(mode="after")
    def _targets(self) -> Self:
        names = self.targets or []
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"'targets' has '{twice[0]}' twice: remove one")
        return self

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / self.rank


MOST_TOGETHER = 16384  # tokens of a micro-batch, where memory decides: more at once are hardly faster


class TrainerConfig(Section):
    """How DeepSpeed trains one model."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="which optimizer, and its schedule")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="DeepSpeed ZeRO stage: what is sharded over the ranks; 0: nothing, only for float32 weights; "
        "1: the optimizer's state, gradients are reduced once per step; 2: gradients too, reduced with every "
        "micro-batch; 3: weights too",
    )
    hpz: bool = Field(
        False,
        description="ZeRO stage 3 on several machines: each holds all weights once more, sharded over its ranks, where "
        "the backward pass gathers them",
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="recompute activations in the backward pass, slower with less memory; null: only where the memory "
        "estimate does not fit otherwise",
    )
    micro_batch_tokens: ScheduledAboveZero[int] | None = Field(
        MOST_TOGETHER,
        description="prompt + response tokens of one forward pass on one rank, or on all that compute it together "
        "(sequence_parallel); null: as many as the estimate of memory has room for at the start, up to "
        f"{MOST_TOGETHER}",
    )
    offload_optimizer: bool = Field(
        False,
        description="keep the optimizer's state and the float32 masters in host memory between updates, for a larger "
        "KV cache in the rollout; ZeRO stage 2 only, no effect on CPU",
    )
    offload: Literal["nothing", "optimizer", "all"] = Field(
        "nothing",
        description="what of a large model lives in host memory for good, ZeRO stage 3 only; optimizer: float32 "
        "masters, the optimizer's state and the sums of gradients, and steps are taken by the host's cores; all: the "
        "shards of the weights, too; saves nothing on CPU",
    )
    offload_folder: str | None = Field(
        None,
        description="folder on a fast local disk of each machine, e.g. /local/nvme: what 'offload' names lives in "
        "files there instead of in host memory, but for the sums of gradients; null: in memory",
    )
    offload_activations: bool = Field(
        False,
        description="where activations are recomputed, keep what each block begins with in host memory until the "
        "backward pass; needs 'gradient_checkpointing' true, saves nothing on CPU",
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters and leave the weights as they are; null: train all weights"
    )

    @property
    def budget(self) -> int | dict[int, int]:
        """The tokens of a micro-batch; until memory has decided the most that it may grant."""
        return MOST_TOGETHER if self.micro_batch_tokens is None else self.micro_batch_tokens

    @model_validator(mode="after")
    def _whole(self) -> Self:
        name, whole = self.optimizer.name, self.optimizer.whole
        if whole is not None and self.zero_stage:
            raise ValueError(
                f"'optimizer.name' {name} needs 'zero_stage' 0, not {self.zero_stage}: {whole}, and the other stages "
                "cut parameters; with weights too large for that take adamw or sgd"
            )
        if whole is not None and self.lora is not None:
            raise ValueError(f"'optimizer.name' {name} is for whole weights, not for 'lora': take adamw or sgd")
        return self

    @model_validator(mode="after")
    def _hpz(self) -> Self:
        if self.hpz and self.zero_stage != 3:
            raise ValueError(f"'hpz' needs 'zero_stage' 3, not {self.zero_stage}, where every rank has all weights")
        return self

    @model_validator(mode="after")
    def _lora(self) -> Self:
        if self.lora is not None and self.zero_stage == 3:
            raise ValueError(
                "'lora' needs 'zero_stage' 0, 1 or 2: 3 shards the weights that are trained, and adapters are small"
            )
        return self

    @model_validator(mode="after")
    def _offload(self) -> Self:
        if self.offload_optimizer and self.zero_stage != 2:
            raise ValueError(
                f"'offload_optimizer' needs 'zero_stage' 2, not {self.zero_stage}: {OFFLOAD_REFUSED[self.zero_stage]}"
            )
        return self

    @model_validator(mode="after")
    def _offload_for_good(self) -> Self:
        if self.offload == "nothing":
            return self
        if self.zero_stage != 3:
            raise ValueError(
                f"'offload' {self.offload} needs 'zero_stage' 3, not {self.zero_stage}: the other stages keep all "
                "weights on the device; stage 2 has 'offload_optimizer'"
            )
        if self.hpz:
            raise ValueError("'hpz' does not go with 'offload': it spends the device's memory that the other saves")
        return self

    @model_validator(mode="after")
    def _offload_folder(self) -> Self:
        if self.offload_folder is None:
            return self
        if self.offload == "nothing":
            raise ValueError("'offload_folder' has no effect without 'offload': set 'offload' optimizer or all")
        if not PurePath(self.offload_folder).is_absolute():
            raise ValueError(
                f"'offload_folder' {self.offload_folder} must begin with /: each machine has its ranks' files there"
            )
        return self

    @model_validator(mode="after")
    def _offload_activations(self) -> Self:
        if self.offload_activations and self.gradient_checkpointing is not True:
            raise ValueError(
                "'offload_activations' needs 'gradient_checkpointing' true: what is kept of each block is its input"
            )
        return self


OFFLOAD_REFUSED = {
    0: "without ZeRO there is nothing that DeepSpeed could move",
    1: "in bfloat16 DeepSpeed's optimizer of stage 1 cannot move its state, and stage 2 shards more",
    3: "there DeepSpeed moves the state of an Adam of its own only, which has to be compiled on the machine; with "
    "'offload' the state is in host memory for good",
}


class TogetherConfig(TrainerConfig):
    """A model of reinforcement learning, whose rows may be too long for one rank."""

    sequence_parallel: PositiveInt = Field(
        1,
        description="so many ranks of a group compute each micro-batch together, each a share of its tokens, for rows "
        "too long for one; 'micro_batch_tokens' are those of all of them",
    )


# Without ZeRO DeepSpeed clips by the mean of the ranks' norms, and each has other experts; ZeRO-3 shards all weights.
EXPERTS_APART = (1, 2)
FP8_STAGES = (1, 2)


class ActorConfig(TogetherConfig):
    """The policy that is trained."""

    routing: Literal["own", "replay"] = Field(
        "own",
        description="which experts of a mixture a token takes in training; own: those that the actor's routers choose; "
        "replay: those that the rollout engine's chose when it was sampled; mixtures of experts only",
    )

    expert_parallel: PositiveInt = Field(
        1,
        description="the experts of each layer of a mixture are shared out over so many ranks of the group, and tokens "
        "go to the ranks of their experts; 1: every rank has all",
    )

    fp8: bool = Field(
        False,
        description="linear layers of the blocks compute outputs and inputs' gradients in FP8, for log-probs and in "
        "updates; weights, their gradients and all else stay bfloat16; dense models on Hopper GPUs only",
    )

    @model_validator(mode="after")
    def _fp8(self) -> Self:
        if self.fp8 and self.lora is not None:
            raise ValueError("'fp8' does not go with 'lora': adapters have not been compared in FP8; remove one")
        if self.fp8 and self.zero_stage not in FP8_STAGES:
            raise ValueError(
                f"'fp8' needs 'zero_stage' 1 or 2, not {self.zero_stage}: 0 is for float32 weights, and 3 shards the "
                "weights that are rounded once per step"
            )
        return self

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.expert_parallel == 1:
            return self
        given = {
            f"zero_stage {self.zero_stage}": self.zero_stage not in EXPERTS_APART,
            "lora": self.lora is not None,
            "offload_optimizer": self.offload_optimizer,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(
                f"'expert_parallel' {self.expert_parallel} does not go with '{names[0]}': it is for 'zero_stage' "
                "1 or 2 with all weights trained, their optimizer's state on the device"
            )
        return self

    @property
    def replays(self) -> bool:
        """Whether tokens take the experts that they had in the rollout."""
        return self.routing == "replay"


class CriticConfig(TogetherConfig):
    """The value model (PPO). It starts from the actor's weights with a new scalar head."""

    path: str | None = Field(None, description="Hugging Face folder to start from; default: the actor's starting point")
    value_clip: float | None = Field(0.2, gt=0, description="clip range of the value loss; null: no clipping")

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.lora is not None and self.lora.experts:
            raise ValueError(
                "'lora.experts' is for policies: adapters beside a critic's experts have not been compared; remove it"
            )
        return self


class SftConfig(TrainerConfig):
    """Supervised training on prompt/response pairs: the `sft` flow, also the warm-up of `train`."""

    steps: PositiveInt = Field(400, description="optimizer steps")
    batch: PositiveInt = Field(128, description="rows of one optimizer step")
    max_tokens: PositiveInt = Field(1024, description="longer rows are dropped and counted, tokens")
    checkpoint_every: int = Field(
        100, ge=0, description="optimizer steps between checkpoints, of which the newest is kept until the end; 0: none"
    )

    @model_validator(mode="after")
    def _alone(self) -> Self:
        if self.offload_optimizer:
            raise ValueError("'offload_optimizer' has no effect here (nothing else needs the memory): remove it")
        return self
