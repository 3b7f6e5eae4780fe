"""Clipped importance sampling: the ratio is a clipped weight, and every token keeps a gradient.

Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), equations 4 and 5.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

ALGORITHMS = (
    Algorithm(
        name="cispo",
        advantage="grpo",
        policy_loss="cispo",
        description="GRPO with the ratio as a clipped weight on the plain policy gradient: no token is left out",
        paper="2506.13585",
    ),
)


def cispo(
    inputs: PolicyLossInputs, *, clip_low: Annotated[float, Ge(0)] = 1.0, clip_high: Annotated[float, Ge(0)] = 4.0
) -> PolicyLossOutputs:
    """-w A log pi(token), with w = clip(ratio, 1 - clip_low, 1 + clip_high) held constant: its gradient is -w A.

    Args:
        inputs: a micro-batch.
        clip_low: how far the weight may fall below 1; 1 is no bound, which is what the paper uses.
        clip_high: how far the weight may rise above 1; the paper tunes it and names no value, 4 is that of ScaleRL
            (Khatri et al. 2025, arXiv 2510.13786), a weight of at most 5.

    Note:
        The paper names no upper bound; 4 is that of 2510.13786.
    """
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T).detach()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -weight_T * inputs.advantages_T * inputs.logprobs_T
    return PolicyLossOutputs(
        loss_T, ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T, weight_T != ratio_T)
    )
