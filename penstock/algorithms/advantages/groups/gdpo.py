"""Group reward-decoupled normalisation: each part of a reward is normalised within the group by itself, then summed.

Why: summed first, a part of large spread drowns the others, and different mixtures of parts become one advantage.
Source: Liu et al. 2026 (arXiv 2601.05242).

Shapes: _B rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.algorithms.advantages.groups.grpo import STD_EPSILON
from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import group_statistics, whitened

NEEDS: tuple[Need, ...] = ("group", "reward_parts")

ALGORITHMS = (
    Algorithm(
        name="gdpo",
        advantage="gdpo",
        policy_loss="ppo_clip",
        description="for rewards of several parts: each is normalised within the group by itself, then summed",
        paper="2601.05242",
    ),
)


def gdpo(inputs: AdvantageInputs, *, part_weights: Mapping[str, float] | None = None) -> Advantages:
    """A = normalised over the batch: sum over parts of w (r - mean of the group) / (std of the group + 1e-6).

    The batch's mean and variance are those of its rows. A row without a part (its reward failed) takes no part in the
    group's statistics of it and gets 0 for it, as do groups of one and of equal parts; where nothing else is in the
    batch the result is exactly 0. Neither the reward as a whole nor token rewards are read.

    Args:
        inputs: a batch with ``parts_B``.
        part_weights: w by name of the part, other parts are left out; None for all parts with weight 1.

    Note:
        Both variances are unbiased. Parts are the columns ``reward/<part>``. A KL in the reward, which is in no part,
        is refused.

    Raises:
        ValueError: there are no parts, or none of a name that has a weight.
    """
    weights = dict.fromkeys(inputs.parts_B, 1.0) if part_weights is None else part_weights
    if missing := sorted(set(weights) - set(inputs.parts_B)):
        raise ValueError(f"the rewards have no part {', '.join(missing)}; there are {', '.join(inputs.parts_B)}")
    if not weights:
        raise ValueError("gdpo needs rewards of several parts, and these have none")
    summed_B = np.zeros(inputs.rewards_B.size)
    for name, weight in weights.items():
        has_B = np.isfinite(inputs.parts_B[name])
        group = group_statistics(inputs.parts_B[name][has_B], inputs.groups_B[has_B])
        summed_B[has_B] += weight * group.centred_B / (group.std_B + STD_EPSILON)
    return spread_over_tokens(whitened(summed_B), inputs)
