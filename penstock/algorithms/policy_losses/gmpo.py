"""Geometric-mean policy optimisation: a sequence is worth the geometric mean of its tokens' clipped ratios.

Source: Zhao et al. 2025 (arXiv 2507.20673), the objective with token-level clipping.

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
        name="gmpo",
        advantage="grpo",
        policy_loss="gmpo",
        description="GRPO with the geometric instead of the arithmetic mean of a sequence's clipped ratios",
        paper="2507.20673",
        aggregation="seq-mean-token-mean",
    ),
)


def gmpo(
    inputs: PolicyLossInputs,
    *,
    log_clip_low: Annotated[float, Ge(0)] = 0.4,
    log_clip_high: Annotated[float, Ge(0)] = 0.4,
) -> PolicyLossOutputs:
    """-A exp(mean of the sequence's clipped log-ratios), the same for all tokens of a sequence with one advantage.

    A log-ratio is clipped on the side where it overshoots: above log_clip_high where A > 0, below -log_clip_low where
    A < 0. A clipped token passes no gradient, the others of its sequence do, each through its own log-ratio.

    Args:
        inputs: a micro-batch of whole sequences.
        log_clip_low: how far the log-ratio of a token may fall below 0.
        log_clip_high: how far the log-ratio of a token may rise above 0.

    Note:
        Log-ratios are clipped above for ``A > 0``, below for ``A < 0``. The gradient goes token by token, as for
        ``gspo``.
    """
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    not_above_T, not_below_T = log_ratio_T.clamp(max=log_clip_high), log_ratio_T.clamp(min=-log_clip_low)
    clipped_T = not_above_T.where(inputs.advantages_T > 0, not_below_T)
    ratio_T = sequence_ratio(clipped_T, inputs.mask_T, inputs.offsets_B1)
    return PolicyLossOutputs(
        -inputs.advantages_T * ratio_T,
        ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T, clipped_T != log_ratio_T),
    )
