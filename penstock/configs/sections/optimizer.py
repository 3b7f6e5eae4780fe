"""The section of an optimizer, and the table of those that there are.

Left out: who makes them of torch's classes (penstock/engines/training/optimizers.py), what their states take
(penstock/engines/sizing/optimizer_states.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.configs.tree.schedule import Scheduled
from penstock.configs.tree.section import Section, fill, refuse


@dataclass(frozen=True)
class Optimizer:
    """What tells an optimizer from others.

    Attributes:
        own: the keys that not every optimizer has, with their defaults; of others they are refused.
        whole: why it has to see a parameter as the matrix that it is, and so cannot step the flat parts that ZeRO
            stages 1 to 3 make of them; None: every number is stepped by itself.
    """

    own: Mapping[str, Any]
    whole: str | None = None


LEAST_8BIT = 4096  # numbers of a parameter: a smaller one's moments stay float32, as bitsandbytes has it
BLOCK_8BIT = 256  # numbers that have a scale in common

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}
OPTIMIZERS = {
    "adamw": Optimizer(ADAMW),
    "sgd": Optimizer({"momentum": 0.9}),
    "muon": Optimizer({"momentum": 0.95, **ADAMW}, whole="it orthogonalises the update of a matrix"),
    "adamw8bit": Optimizer(ADAMW, whole="it keeps its states in blocks of a parameter's numbers"),
    "adafactor": Optimizer({}, whole="it keeps sums over the rows and columns of a matrix"),
}


Rate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer and its learning rate. lr(step) = learning_rate x warm-up x decay."""

    name: Literal["adamw", "sgd", "muon", "adamw8bit", "adafactor"] = Field(
        "adamw",
        description="which one; muon is for matrices of the blocks, with AdamW for all else; muon, adamw8bit and "
        "adafactor need zero_stage 0",
    )
    learning_rate: Scheduled[float] = Field(1e-6, description="peak learning rate; may follow a schedule by iteration")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    min_ratio: float = Field(0.0, ge=0, le=1, description="the decay ends at this share of learning_rate")
    betas: tuple[Rate, Rate] | None = Field(
        None, description="AdamW's moment decay rates, default: 0.9 and 0.95 (adamw, adamw8bit, muon)"
    )
    eps: float | None = Field(None, gt=0, description="AdamW's epsilon; default: 1e-8 (adamw, adamw8bit, muon)")
    momentum: Rate | None = Field(
        None, description="share of the update before that goes on; default: sgd 0.9, muon 0.95"
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; sgd: added to the gradient")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")

    @model_validator(mode="after")
    def _decay(self) -> Self:
        if self.decay == "constant" and self.min_ratio:
            raise ValueError("'min_ratio' has no effect with decay 'constant': remove it")
        return self

    @model_validator(mode="after")
    def _own_keys(self) -> Self:
        own = OPTIMIZERS[self.name].own
        others = {key for one in OPTIMIZERS.values() for key in one.own} - own.keys()
        refuse(self, tuple(sorted(others)), f"with optimizer '{self.name}'")
        fill(self, **own)
        return self

    @property
    def package(self) -> str | None:
        """The package that has it, where it is none of torch's."""
        return "bitsandbytes" if self.name == "adamw8bit" else None

    @property
    def whole(self) -> str | None:
        """Why it needs whole parameters on every rank; None: it does not."""
        return OPTIMIZERS[self.name].whole
