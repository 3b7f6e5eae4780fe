"""Clip-Cov: PPO's clipped loss, without the gradient of a few tokens that would drive the entropy down most.

Source: Cui et al. 2025 (arXiv 2505.22617), equation 11 and listing 1. Two things are otherwise. The covariance is that
of the policy that generated, which at the first step of an iteration is the current one: it is known before a
mini-batch is split. And where the paper draws the tokens at random among those within the bounds, here they are spread
evenly over their ranks by covariance: the same distribution, nothing random.

Shapes: _T flat response tokens of a micro-batch, _C counted tokens of a mini-batch.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from penstock.algorithms.covariance import number_of, token_covariances
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.policy_losses.ppo_clip import ppo_clip
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs

NEEDS: tuple[Need, ...] = ("old_logprobs",)

ALGORITHMS = (
    Algorithm(
        name="clip_cov",
        advantage="grpo",
        policy_loss="clip_cov",
        description="GRPO that leaves out a few of the tokens that would drive the entropy down most",
        paper="2505.22617",
    ),
)


def choose(
    advantages_C: np.ndarray,
    old_logprobs_C: np.ndarray,
    *,
    covariance_share: Annotated[float, Gt(0), Le(1)] = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> np.ndarray:
    """Mark that share of the mini-batch's tokens, among those with covariance between the bounds; boolean, _C.

    Args:
        advantages_C: of the counted tokens.
        old_logprobs_C: likewise.
        covariance_share: share of all counted tokens, rounded down, at least one; fewer where the bounds hold fewer.
        covariance_low: tokens of a covariance not above it are never taken.
        covariance_high: tokens of a covariance not below it are never taken: outliers say nothing.
    """
    covariances_C = token_covariances(advantages_C, old_logprobs_C)
    within = np.flatnonzero((covariances_C > covariance_low) & (covariances_C < covariance_high))
    wanted = min(number_of(covariance_share, covariances_C.size), within.size)
    ranked = within[np.argsort(covariances_C[within], kind="stable")]
    chosen_C = np.zeros(covariances_C.size, dtype=bool)
    chosen_C[ranked[(2 * np.arange(wanted) + 1) * within.size // max(2 * wanted, 1)]] = True
    return chosen_C


def clip_cov(
    inputs: PolicyLossInputs, *, clip_low: Annotated[float, Ge(0)] = 0.2, clip_high: Annotated[float, Ge(0)] = 0.2
) -> PolicyLossOutputs:
    """PPO's clipped loss; a chosen token keeps its value and passes no gradient. Metric ``chosen``: their share.

    Args:
        inputs: a micro-batch with ``chosen_T``.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.

    Note:
        Chosen tokens keep their value in the loss and their place in its divisor. They are spread evenly over the ranks
        within the bounds, where the paper draws at random.

    Raises:
        ValueError: ``inputs.chosen_T`` is None.
    """
    if inputs.chosen_T is None:
        raise ValueError("clip_cov needs tokens chosen over the whole mini-batch, and the inputs hold none")
    outputs = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high)
    loss_T = outputs.loss_T.detach().where(inputs.chosen_T > 0, outputs.loss_T)
    return PolicyLossOutputs(loss_T, {**outputs.metrics_T, "chosen": inputs.chosen_T})
