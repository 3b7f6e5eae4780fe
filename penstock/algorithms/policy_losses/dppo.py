"""Divergence PPO: a token is held back when its probability has moved too far, not when its ratio has.

A ratio says little about how far a policy moved: that of a rare token is large after a step that hardly matters, that
of a likely one small after a step that does. Source: Qi et al. 2026 (arXiv 2602.04879), the binary divergences, which
compare the chosen token against all others together, and section 5.4 for the bound on the weight.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

if TYPE_CHECKING:
    from torch import Tensor

PROBABILITY_FLOOR = 1e-8  # of all other tokens together, where the chosen one is certain

ALGORITHMS = (
    Algorithm(
        name="dppo",
        advantage="grpo",
        policy_loss="dppo",
        description="GRPO with a bound on how far a token's probability moves instead of a clip of its ratio",
        paper="2602.04879",
    ),
)


def dppo(
    inputs: PolicyLossInputs,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_bound: Annotated[float, Gt(0)] = 0.15,
    weight_bound: Annotated[float, Ge(1)] = 20.0,
) -> PolicyLossOutputs:
    """-w A log pi(token), with w = min(ratio, weight_bound) held constant, and 0 where the token has left its bound.

    It has where A would move it further away, up for A > 0 and down for A < 0, and its divergence exceeds the bound.

    Args:
        inputs: a micro-batch.
        divergence: of the generating policy from the actor, on the chosen token against the rest: ``tv``
            abs(p - p_old); ``kl`` p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
        divergence_bound: the largest divergence of a token that is not held back; the paper has 0.15 for tv and 0.05
            for kl.
        weight_bound: the largest ratio as a weight.

    Note:
        The divergence is the binary one of the chosen token; 0.05 is the paper's bound for kl. There is no top-k form.
    """
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T).detach()
    away_T = (ratio_T > 1).where(inputs.advantages_T > 0, ratio_T < 1)
    stopped_T = away_T & (binary_divergence(inputs, divergence) > divergence_bound)
    weight_T = ratio_T.clamp(max=weight_bound).masked_fill(stopped_T, 0.0)
    loss_T = -weight_T * inputs.advantages_T * inputs.logprobs_T
    return PolicyLossOutputs(loss_T, ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T, stopped_T))


def binary_divergence(inputs: PolicyLossInputs, divergence: Literal["tv", "kl"]) -> Tensor:
    """Divergence of the generating policy from the actor with all other tokens taken as one, _T, without gradient."""
    logprobs_T, old_T = inputs.logprobs_T.detach(), inputs.old_logprobs_T
    if divergence == "tv":
        return (logprobs_T.exp() - old_T.exp()).abs()
    rest_T = (-logprobs_T.expm1()).clamp(min=PROBABILITY_FLOOR)
    old_rest_T = (-old_T.expm1()).clamp(min=PROBABILITY_FLOOR)
    return old_T.exp() * (old_T - logprobs_T) + old_rest_T * (old_rest_T / rest_T).log()
