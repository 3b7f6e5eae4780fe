"""Group policy gradient: the group's mean as baseline, and no dilution by groups from which nothing is learnt.

Source: Chu et al. 2025 (arXiv 2504.02546). Its loss is the plain policy gradient, ``policy_losses/reinforce.py``.

Shapes: _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import group_statistics

NEEDS: tuple[Need, ...] = ("group",)

ALGORITHMS = (
    Algorithm(
        name="gpg",
        advantage="gpg",
        policy_loss="reinforce",
        description="the plain policy gradient on rewards minus the group's mean, scaled up for groups without spread",
        paper="2504.02546",
    ),
)


def gpg(inputs: AdvantageInputs) -> Advantages:
    """A = B / (B - M) (R - mean of the group), where M of the B rows belong to groups of equal rewards.

    Those rows, and groups of one among them, get exactly 0; without any other row so does the whole batch. B and M are
    counted over the batch of the iteration.

    Note:
        B and M are counted over the iteration's batch.
    """
    group = group_statistics(inputs.scores_B(), inputs.groups_B)
    learning = (group.std_B > 0).sum()
    return spread_over_tokens(group.centred_B * (group.std_B.size / max(learning, 1)), inputs)
