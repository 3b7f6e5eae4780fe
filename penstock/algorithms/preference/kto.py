"""Kahneman-Tversky optimization: each response is good or bad by itself, no pairs.

Source: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8. How far the policy is from the reference (z0 there) is
estimated by the caller over the whole batch, from prompts joined with responses of other prompts, without gradient.

Shapes: _B rows.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from penstock.algorithms.preference.types import LabelInputs, PreferenceOutputs, log_ratios

LABELLED = True

PAPER = "2402.01306"


def kto(
    inputs: LabelInputs,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    desirable_weight: Annotated[float, Gt(0)] = 1.0,
    undesirable_weight: Annotated[float, Gt(0)] = 1.0,
) -> PreferenceOutputs:
    """w (1 - sigmoid(s beta (r - z0))): r the log-ratio, s = 1 and -1 and w for good and for bad responses.

    The margin reported is s beta (r - z0): it is above 0 where the response is on its label's side of z0.

    Args:
        inputs: with reference log-probs, labels and z0.
        beta: strength of the pull to the reference; the paper's aversion to risk.
        desirable_weight: w, the weight of good responses; to balance labels that are uneven.
        undesirable_weight: w, the weight of bad responses.

    Note:
        Each step runs one more forward pass, of prompts with responses to other prompts, which estimates z0.
    """
    margin_B = beta * (2 * inputs.desirable_B - 1) * (log_ratios(inputs) - inputs.kl)
    weight_B = undesirable_weight + (desirable_weight - undesirable_weight) * inputs.desirable_B
    return PreferenceOutputs(weight_B * (1 - margin_B.sigmoid()), margin_B.detach())
