"""REINFORCE leave-one-out: a sequence is judged against the mean of the other answers to its prompt.

Source: Ahmadian et al. 2024 (arXiv 2402.14740), after Kool et al. 2019.

Shapes: _B rows.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import group_statistics

NEEDS: tuple[Need, ...] = ("group",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="rloo",
        advantage="rloo",
        policy_loss="ppo_clip",
        description="no critic: the mean of a prompt's other samples is the baseline",
        paper="2402.14740",
        aggregation="seq-mean-token-sum",
    ),
)


def rloo(inputs: AdvantageInputs) -> Advantages:
    """A = R - mean of the other rewards of the group = (R - mean of the group) n / (n - 1), at every counted token.

    R is the row's reward plus its counted token rewards. A group of one has no other to be compared with, and equal
    rewards do not differ: exactly 0 both. A row without a counted token receives nothing but counts for the others.

    Note:
        On-policy it is the paper's loss; with more steps PPO's clip guards it.
    """
    group = group_statistics(inputs.scores_B(), inputs.groups_B)
    return spread_over_tokens(group.centred_B * group.sizes_B / np.maximum(group.sizes_B - 1, 1), inputs)
