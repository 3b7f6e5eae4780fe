"""Generalised advantage estimation, and PPO, the algorithm which it makes with the clipped loss.

Source: Schulman et al. 2015 (arXiv 1506.02438), equation 16. An episode ends with its response, also one cut off at
the length limit: nothing is bootstrapped beyond the last token.

Shapes: _T flat response tokens, _C the counted tokens among them, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, CountedTokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import whitened
from penstock.algorithms.segments import discounted_sums

NEEDS: tuple[Need, ...] = ("critic",)

SEPARABLE = "whiten"  # as long as this setting is off

ALGORITHMS = (
    Algorithm(
        name="ppo",
        advantage="gae",
        policy_loss="ppo_clip",
        description="a critic, generalised advantage estimation and a clipped ratio",
        paper="1707.06347, 1506.02438",
    ),
)


def gae(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 0.95,
    whiten: bool = True,
) -> Advantages:
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), with delta_t = r_t + gamma V_(t+1) - V_t.

    Time runs over counted tokens only: an observation neither earns, nor is valued, nor takes a step of discount.

    Args:
        inputs: a batch with ``values_T``.
        gamma: discount per counted token.
        gae_lambda: bias against variance: 0 trusts the critic, 1 trusts the rewards.
        whiten: shift and scale the advantages to mean 0 and variance 1 over the counted tokens of the batch; the
            returns are computed before that.

    Note:
        Nothing is bootstrapped beyond a truncated response.

    Raises:
        ValueError: ``inputs.values_T`` is None.
    """
    counted, advantages_C, returns_T = generalised(inputs, gamma, gae_lambda)
    return Advantages(counted.spread(whitened(advantages_C) if whiten else advantages_C), returns_T)


def generalised(
    inputs: AdvantageInputs, gamma: float, gae_lambda: float
) -> tuple[CountedTokens, np.ndarray, np.ndarray]:
    """The counted tokens, their advantages (_C, float64) before any normalisation, and returns_T.

    Raises:
        ValueError: ``inputs.values_T`` is None.
    """
    if inputs.values_T is None:
        raise ValueError("gae needs the critic's values, and the inputs hold none")
    counted = inputs.counted()
    values_C = inputs.values_T[counted.at_C].astype(np.float64)
    next_values_C = np.roll(values_C, -1)
    next_values_C[counted.last_B] = 0.0
    deltas_C = counted.rewards_C + gamma * next_values_C - values_C
    advantages_C = discounted_sums(deltas_C, counted.offsets_B1, gamma * gae_lambda)
    return counted, advantages_C, counted.spread(advantages_C + values_C)
