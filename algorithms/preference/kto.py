"""Kahneman-Tversky optimization: each response is good or bad by itself, no pairs.

Source: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8. How far the policy is from the reference (z0 there) is
estimated by the caller over the whole batch, from prompts joined with responses of other prompts, without gradient.

Shapes: _B rows.
"""

from __future__ import annotations

from algorithms.preference.types import LabelInputs, PreferenceOutputs, log_ratios

LABELLED = True


def kto(
    inputs: LabelInputs, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> PreferenceOutputs:
    """w (1 - sigmoid(s beta (r - z0))): r the log-ratio, s = 1 and -1 and w for good and for bad responses.

    The margin reported is s beta (r - z0): it is above 0 where the response is on its label's side of z0.

    Args:
        inputs: with reference log-probs, labels and z0.
        beta: aversion to risk, above 0.
        desirable_weight: w of good responses; to balance labels that are uneven.
        undesirable_weight: w of bad responses.
    """
    margin_B = beta * (2 * inputs.desirable_B - 1) * (log_ratios(inputs) - inputs.kl)
    weight_B = undesirable_weight + (desirable_weight - undesirable_weight) * inputs.desirable_B
    return PreferenceOutputs(weight_B * (1 - margin_B.sigmoid()), margin_B.detach())
