"""Group sequence policy optimisation: one ratio per sequence, the geometric mean of its tokens' ratios.

Source: Zheng et al. 2025 (arXiv 2507.18071), equations 5 to 7 and, for the gradient of a token, 13 and 14.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, sequence_ratio

ALGORITHMS = (
    Algorithm(
        name="gspo",
        advantage="grpo",
        policy_loss="gspo",
        description="GRPO with one clipped ratio per sequence, the geometric mean of its tokens'",
        paper="2507.18071",
        aggregation="seq-mean-token-mean",
    ),
)


def gspo(
    inputs: PolicyLossInputs, *, clip_low: Annotated[float, Ge(0)] = 3e-4, clip_high: Annotated[float, Ge(0)] = 4e-4
) -> PolicyLossOutputs:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean of the sequence's log-ratios).

    Value and clip are the sequence's; the gradient goes through each token's own log-probability, as in GSPO-token
    (equation 14). Where all tokens of a sequence have one advantage that is the gradient of the sequence form; where
    they have not, each token moves by its own.

    Args:
        inputs: a micro-batch of whole sequences.
        clip_low: how far the sequence's ratio may fall below 1; the mean over many tokens moves little.
        clip_high: how far the sequence's ratio may rise above 1.

    Note:
        The gradient is that of GSPO-token: the same for one advantage per sequence, and right for several.
    """
    ratio_T = sequence_ratio(inputs.logprobs_T - inputs.old_logprobs_T, inputs.mask_T, inputs.offsets_B1)
    unclipped_T = -inputs.advantages_T * ratio_T
    loss_T = unclipped_T.maximum(-inputs.advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high))
    return PolicyLossOutputs(
        loss_T, ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T, loss_T != unclipped_T)
    )
