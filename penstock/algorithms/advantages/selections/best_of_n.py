"""Best of n: the best responses to a prompt are imitated, the others are left out.

Source: Dong et al. 2023 (RAFT, arXiv 2304.06767), with n the size of the group.

Shapes: _B rows, _G groups.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, accept
from penstock.algorithms.declarations.algorithm import Algorithm, Need

NEEDS: tuple[Need, ...] = ("group", "whole_rewards")

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="best_of_n",
        advantage="best_of_n",
        policy_loss="reinforce",
        description="imitates the best of a prompt's samples and leaves the others out",
        paper="2304.06767",
    ),
)


def best_of_n(inputs: AdvantageInputs, *, accept_best: Annotated[int, Ge(1)] = 1) -> Advantages:
    """A = 1 for the best rows of each group, and the loss counts these rows alone; 0 for the others.

    A row is among the best if its reward is at least the group's ``accept_best``-th and above the group's lowest. So
    all that tie are treated alike, and a group of one, or of equal rewards, has no best: nothing of it is accepted.
    Token rewards are not read; a row without a counted token takes its place in the ranking.

    Args:
        inputs: a batch.
        accept_best: how many rows of a group are accepted, ties aside.

    Note:
        Ties are accepted together. The loss counts accepted responses alone.
    """
    _, group_B, sizes_G = np.unique(inputs.groups_B, return_inverse=True, return_counts=True)
    sorted_B = inputs.rewards_B[np.lexsort((inputs.rewards_B, group_B))]  # by group, best last
    ends_G = np.cumsum(sizes_G)
    lowest_G = sorted_B[ends_G - sizes_G]
    bar_G = sorted_B[ends_G - np.minimum(accept_best, sizes_G)]
    return accept((inputs.rewards_B >= bar_G[group_B]) & (inputs.rewards_B > lowest_G[group_B]), inputs)
