"""On-policy optimisation with the optimal reward baseline: a group's mean, weighted by the length of the answers.

Source: Hao et al. 2025 (arXiv 2505.23585): the baseline of least variance if a sequence's squared gradient norm is
proportional to its length.

Shapes: _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import centred
from penstock.algorithms.segments import segment_sum

NEEDS: tuple[Need, ...] = ("group",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="opo",
        advantage="opo",
        policy_loss="ppo_clip",
        description="no critic: the group's mean weighted by length is the baseline; meant for on-policy updates",
        paper="2505.23585",
    ),
)


def opo(inputs: AdvantageInputs) -> Advantages:
    """A = R - (sum of l R) / (sum of l) over the group, with l a row's counted tokens, at every counted token.

    A group of one, and equal rewards, give exactly 0. A row without a counted token has weight 0.

    Note:
        It is meant for ``mini_batches: 1``.
    """
    lengths_B = segment_sum(inputs.mask_T, inputs.offsets_B1)
    return spread_over_tokens(centred(inputs.scores_B(), inputs.groups_B, lengths_B), inputs)
