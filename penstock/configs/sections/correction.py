"""The section `algorithm.correction`: what is done about tokens that another policy than the trainer's has sampled."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.algorithms.correction import Correction, Measure
from penstock.configs.tree.section import Section, fill, refuse

Bound = Annotated[float, Field(gt=0)]


class CorrectionConfig(Section):
    """Correction for the rollout engine's own policy. Empty: the mismatch is measured, nothing is corrected."""

    proximal: Literal["recomputed", "rollout"] = Field(
        "recomputed",
        description="the policy that the loss's ratio compares with: the trainer's log-probs before the update, or the "
        "rollout engine's own, which needs no pass for old log-probs",
    )
    weights: Literal["token", "sequence"] | None = Field(
        None,
        description="importance weights on the policy loss, of single tokens or of whole sequences; null: none",
    )
    cap: float | None = Field(
        None, ge=1, description="larger weights are cut to it; 2 with 'weights' where there is no band"
    )
    band: tuple[float, float] | None = Field(None, description="[low, high]: weights outside become 0")
    normalize: bool | None = Field(
        None, description="divide weights by their mean over the mini-batch; needs old log-probs; false"
    )
    reject: dict[Measure, Bound] = Field(
        default_factory=dict,
        description="largest allowed divergence by measure, <token, seq_mean, seq_sum or seq_max>_<k1, k2 or k3>, in "
        "nats: a token or sequence beyond it is left out of the loss",
    )

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.proximal == "rollout" and self.weights is not None:
            raise ValueError(
                "'weights' has no effect with proximal 'rollout', whose ratio is the weight already: remove one of them"
            )
        if self.weights is None:
            refuse(self, ("cap", "band", "normalize"), "without 'weights'")
            return self
        if self.cap is not None and self.band is not None:
            raise ValueError("'cap' and 'band' exclude each other: remove one")
        if self.band is None:
            fill(self, cap=2.0)
        elif not 0 <= self.band[0] < 1 < self.band[1]:
            raise ValueError(
                f"'band' {list(self.band)} must begin between 0 and 1 and end above 1, the weight of a token on which "
                "both policies agree"
            )
        fill(self, normalize=False)
        return self

    @property
    def in_force(self) -> Correction:
        """What the loss takes."""
        return Correction(self.proximal, self.weights, self.cap, self.band, self.normalize, dict(self.reject))
