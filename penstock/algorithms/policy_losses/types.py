"""What every policy loss takes and returns.

Shapes: _T flat response tokens of a packed micro-batch, _B1 offsets (rows + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyLossInputs:
    """A micro-batch of whole sequences. Where the mask is 0, values are not counted but must be finite.

    Args:
        logprobs_T: log-probabilities under the actor, with gradient.
        old_logprobs_T: the same under the policy that the update started from, without gradient.
        advantages_T: without gradient.
        mask_T: 1.0 where the token is the model's own, else 0.0.
        offsets_B1: integers, where rows begin and end.
        chosen_T: 1.0 where the loss's ``choose`` marked the token, else 0.0; None for a loss without.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    offsets_B1: Tensor
    chosen_T: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossOutputs:
    """One value per token, unmasked: the aggregation applies the mask.

    Args:
        loss_T: loss, with gradient.
        metrics_T: what to report, detached, to be averaged over counted tokens.
    """

    loss_T: Tensor
    metrics_T: dict[str, Tensor]
