"""KL-Cov: the policy gradient with a ratio, and a pull back on a few tokens that would drive the entropy down most.

Source: Cui et al. 2025 (arXiv 2505.22617), equations 12 and 13 and listing 1, where the pull is the absolute log-ratio.
One thing is otherwise: the covariance is that of the policy that generated, which at the first step of an iteration is
the current one, since it is known before a mini-batch is split.

Shapes: _T flat response tokens of a micro-batch, _C counted tokens of a mini-batch.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from penstock.algorithms.covariance import number_of, token_covariances
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.kl import kl_estimate
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

NEEDS: tuple[Need, ...] = ("old_logprobs",)

ALGORITHMS = (
    Algorithm(
        name="kl_cov",
        advantage="grpo",
        policy_loss="kl_cov",
        description="GRPO without a clip that holds back a few of the tokens that would drive the entropy down most",
        paper="2505.22617",
    ),
)


def choose(
    advantages_C: np.ndarray,
    old_logprobs_C: np.ndarray,
    *,
    covariance_share: Annotated[float, Gt(0), Le(1)] = 2e-3,
) -> np.ndarray:
    """Mark the share of the mini-batch's tokens with the largest covariance; boolean, _C; ties go to earlier tokens.

    Args:
        advantages_C: of the counted tokens.
        old_logprobs_C: likewise.
        covariance_share: share of all counted tokens, rounded down, at least one.
    """
    covariances_C = token_covariances(advantages_C, old_logprobs_C)
    chosen_C = np.zeros(covariances_C.size, dtype=bool)
    chosen_C[np.argsort(-covariances_C, kind="stable")[: number_of(covariance_share, covariances_C.size)]] = True
    return chosen_C


def kl_cov(inputs: PolicyLossInputs, *, covariance_pull: Annotated[float, Ge(0)] = 1.0) -> PolicyLossOutputs:
    """-ratio A, plus covariance_pull abs(log ratio) on chosen tokens. Metric ``chosen``: their share.

    Where the policy has not moved since it generated, the pull and its gradient are exactly 0: it acts from the second
    optimizer step of an iteration on.

    Args:
        inputs: a micro-batch with ``chosen_T``.
        covariance_pull: weight of the pull back on the chosen tokens.

    Note:
        The tokens of largest covariance are chosen.

    Raises:
        ValueError: ``inputs.chosen_T`` is None.
    """
    if inputs.chosen_T is None:
        raise ValueError("kl_cov needs tokens chosen over the whole mini-batch, and the inputs hold none")
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    pull_T = covariance_pull * kl_estimate(inputs.old_logprobs_T, inputs.logprobs_T, "abs")
    loss_T = -inputs.advantages_T * ratio_T + pull_T * inputs.chosen_T
    return PolicyLossOutputs(
        loss_T, {**ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T), "chosen": inputs.chosen_T}
    )
