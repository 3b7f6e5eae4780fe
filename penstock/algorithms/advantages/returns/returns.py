"""The return itself as advantage, the reward still to come: REINFORCE; normalised over the batch, REINFORCE++.

Sources: Williams 1992, "Simple statistical gradient-following algorithms"; Hu et al. 2025 (arXiv 2501.03262), with the
token-level KL penalty in the reward.

Shapes: _C counted tokens.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.normalization import whitened
from penstock.algorithms.segments import discounted_sums

SEPARABLE = "whiten"  # as long as this setting is off

ALGORITHMS = (
    Algorithm(
        name="reinforce",
        advantage="returns",
        policy_loss="reinforce",
        description="the plain policy gradient, without a baseline",
        paper="Williams 1992",
        aggregation="seq-mean-token-sum",
    ),
    Algorithm(
        name="reinforce_pp",
        advantage="returns",
        policy_loss="ppo_clip",
        description="no critic and no groups: returns normalised over the batch; a KL penalty belongs in the reward",
        paper="2501.03262",
        defaults={"whiten": True},
    ),
)


def returns(
    inputs: AdvantageInputs, *, gamma: Annotated[float, Ge(0), Le(1)] = 1.0, whiten: bool = False
) -> Advantages:
    """A_t = sum over k of gamma^k r_(t+k), over counted tokens: an observation takes no step of discount.

    Equal returns at all counted tokens of the batch become exactly 0 by whitening: nothing sets them apart.

    Args:
        inputs: a batch; groups are not read.
        gamma: discount per counted token.
        whiten: shift and scale to mean 0 and variance 1 over the counted tokens of the batch.

    Note:
        REINFORCE++ wants its KL in the reward: ``kl: {place: reward, estimator: k1}``.
    """
    counted = inputs.counted()
    returns_C = discounted_sums(counted.rewards_C, counted.offsets_B1, gamma)
    return Advantages(counted.spread(whitened(returns_C) if whiten else returns_C))
