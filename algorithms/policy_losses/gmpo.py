"""Geometric-mean policy optimisation: a sequence is worth the geometric mean of its tokens' clipped ratios.

Source: Zhao et al. 2025 (arXiv 2507.20673), the objective with token-level clipping.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from algorithms.algorithm import Algorithm
from algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from algorithms.ratio import ratio_metrics, sequence_ratio

ALGORITHMS = (
    Algorithm(
        name="gmpo",
        advantage="grpo",
        policy_loss="gmpo",
        description="GRPO with the geometric instead of the arithmetic mean of a sequence's clipped ratios",
        aggregation="seq-mean-token-mean",
    ),
)


def gmpo(inputs: PolicyLossInputs, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> PolicyLossOutputs:
    """-A exp(mean of the sequence's clipped log-ratios), the same for all tokens of a sequence with one advantage.

    A log-ratio is clipped on the side where it overshoots: above log_clip_high where A > 0, below -log_clip_low where
    A < 0. A clipped token passes no gradient, the others of its sequence do, each through its own log-ratio.

    Args:
        inputs: a micro-batch of whole sequences.
        log_clip_low: how far the log-ratio of a token may fall below 0.
        log_clip_high: how far it may rise above 0.
    """
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    not_above_T, not_below_T = log_ratio_T.clamp(max=log_clip_high), log_ratio_T.clamp(min=-log_clip_low)
    clipped_T = not_above_T.where(inputs.advantages_T > 0, not_below_T)
    ratio_T = sequence_ratio(clipped_T, inputs)
    return PolicyLossOutputs(-inputs.advantages_T * ratio_T, ratio_metrics(inputs, ratio_T, clipped_T != log_ratio_T))
