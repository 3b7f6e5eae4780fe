"""Soft adaptive policy optimisation: a smooth gate instead of a clip, steeper where the advantage is negative.

Source: Gao et al. 2025 (arXiv 2511.20347).

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

ALGORITHMS = (
    Algorithm(
        name="sapo",
        advantage="grpo",
        policy_loss="sapo",
        description="GRPO with a smooth gate on the ratio instead of a clip",
        paper="2511.20347",
        aggregation="seq-mean-token-mean",
    ),
)


def sapo(
    inputs: PolicyLossInputs,
    *,
    gate_positive: Annotated[float, Gt(0)] = 1.0,
    gate_negative: Annotated[float, Gt(0)] = 1.05,
) -> PolicyLossOutputs:
    """-A (4 / tau) sigmoid(tau (ratio - 1)); at ratio 1 its gradient is -A, and falls off to both sides.

    Args:
        inputs: a micro-batch.
        gate_positive: tau where A > 0: how fast the gradient falls off.
        gate_negative: tau elsewhere: the larger, the sooner a token with negative advantage is left alone.

    Note:
        tau depends on the sign of A.
    """
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    positive_T = (4 / gate_positive) * (gate_positive * (ratio_T - 1)).sigmoid()
    negative_T = (4 / gate_negative) * (gate_negative * (ratio_T - 1)).sigmoid()
    loss_T = -inputs.advantages_T * positive_T.where(inputs.advantages_T > 0, negative_T)
    return PolicyLossOutputs(loss_T, ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T))
