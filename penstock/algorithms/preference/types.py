"""What the preference losses take and return, and what they have in common: log-probs of whole responses.

Every token of a response counts, its end-of-sequence token included. Shapes: _T flat response tokens of a packed
micro-batch, _B rows, _B1 offsets (B + 1), _P pairs, _U units that are weighed alike (pairs, or rows with a label).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.algorithms.segments import lengths, segment_sum_torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PairInputs:
    """Rows of which one is preferred to another.

    Args:
        logprobs_T: log-probabilities under the policy, with gradient.
        reference_logprobs_T: the same under the model that training started from; None for a loss without reference.
        offsets_B1: integers, where rows begin and end.
        chosen_P: row of a pair's preferred response.
        rejected_P: row of its other response.
    """

    logprobs_T: Tensor
    reference_logprobs_T: Tensor | None
    offsets_B1: Tensor
    chosen_P: Tensor
    rejected_P: Tensor


@dataclass(frozen=True)
class LabelInputs:
    """Rows of which each is good or bad by itself.

    Args:
        logprobs_T: log-probabilities under the policy, with gradient.
        reference_logprobs_T: the same under the model that training started from.
        offsets_B1: integers, where rows begin and end.
        desirable_B: 1.0 for a good response, 0.0 for a bad one.
        kl: scalar without gradient, not negative: how far the policy is from the reference.
    """

    logprobs_T: Tensor
    reference_logprobs_T: Tensor
    offsets_B1: Tensor
    desirable_B: Tensor
    kl: Tensor


@dataclass(frozen=True)
class PreferenceOutputs:
    """One value per unit; the caller weighs and adds them.

    Args:
        loss_U: loss, with gradient.
        margin_U: by how much the implicit reward is on the right side, detached; above 0 the unit counts as right.
    """

    loss_U: Tensor
    margin_U: Tensor


def log_ratios(inputs: PairInputs | LabelInputs) -> Tensor:
    """log pi(y|x) - log pi_ref(y|x) of every row, shape _B, the sum over its tokens.

    Raises:
        ValueError: the reference's log-probs are absent.
    """
    if inputs.reference_logprobs_T is None:
        raise ValueError("this loss compares with a reference: its log-probs are missing")
    return segment_sum_torch(inputs.logprobs_T - inputs.reference_logprobs_T, inputs.offsets_B1)


def log_ratio_differences(inputs: PairInputs) -> Tensor:
    """The log-ratio of the chosen minus that of the rejected response, shape _P."""
    ratios_B = log_ratios(inputs)
    return ratios_B[inputs.chosen_P] - ratios_B[inputs.rejected_P]


def mean_logprobs(inputs: PairInputs) -> Tensor:
    """Mean log-prob of every row's tokens, shape _B; 0 for an empty row."""
    return segment_sum_torch(inputs.logprobs_T, inputs.offsets_B1) / lengths(inputs.offsets_B1).clamp(min=1)
