"""Settings of LoRA: low-rank adapters that are trained in place of a model's own weights.

A section of its own, since every trained model may have one (actor, critic, supervised training, preferences).
Left out: the adapters themselves (engines/lora.py).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from configs.section import PositiveInt, Section


class LoraConfig(Section):
    """Adapters beside the linear layers W: y = W x + alpha / rank x B A x. W rests, A and B are trained."""

    rank: PositiveInt = Field(32, description="rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    targets: list[str] | None = Field(
        None, min_length=1, description="linear layers by name, e.g. [q_proj, v_proj]; null: all in the blocks"
    )

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
