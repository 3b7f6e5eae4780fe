"""Pass@k: a group is worth its best answer, so only the answer that makes it better than the rest earns anything.

Source: Tang et al. 2025 (arXiv 2503.19595): the leave-one-out advantage of the maximum, with k the size of the group.

Shapes: _B rows, _G groups.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.advantages.groups.grpo import STD_EPSILON
from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import group_statistics

NEEDS: tuple[Need, ...] = ("group",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="pass_at_k",
        advantage="pass_at_k",
        policy_loss="ppo_clip",
        description="rewards the best of a prompt's samples alone, for what it adds to the second best",
        paper="2503.19595",
    ),
)


def pass_at_k(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Advantages:
    """A = max over the group - max over the others of the group: 0 but for a single best row.

    A tie for the best, and hence equal rewards, give exactly 0, as does a group of one: there is no other.

    Args:
        inputs: a batch.
        normalize_by_std: divide by the group's standard deviation + 1e-6, as GRPO does.

    Note:
        k is the group's size. The division is GRPO's, not the paper's.
    """
    scores_B = inputs.scores_B()
    order_B = np.lexsort((scores_B, inputs.groups_B))  # by group, best last
    best_G = np.flatnonzero(np.append(inputs.groups_B[order_B][1:] != inputs.groups_B[order_B][:-1], True))
    best_G = best_G[np.diff(best_G, prepend=-1) > 1]
    advantages_B = np.zeros(scores_B.size)
    advantages_B[order_B[best_G]] = scores_B[order_B[best_G]] - scores_B[order_B[best_G - 1]]
    if normalize_by_std:
        advantages_B /= group_statistics(scores_B, inputs.groups_B).std_B + STD_EPSILON
    return spread_over_tokens(advantages_B, inputs)
