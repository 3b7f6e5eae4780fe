"""REINFORCE++ with a baseline: the group's mean is taken off, the spread is that of the whole batch.

Source: Hu et al. 2025 (arXiv 2501.03262), the variant for several samples of a prompt.

Shapes: _T flat response tokens, _C counted tokens, _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import centred, whitened
from penstock.algorithms.segments import rows_of_tokens

NEEDS: tuple[Need, ...] = ("group",)

ALGORITHMS = (
    Algorithm(
        name="reinforce_pp_baseline",
        advantage="reinforce_pp_baseline",
        policy_loss="ppo_clip",
        description="no critic: the group's mean as baseline, then normalised over the batch",
        paper="2501.03262",
    ),
)


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """A = (R - mean of the group), shifted and scaled to mean 0 and variance 1 over the batch's counted tokens.

    A group of one and a group of equal rewards enter the normalisation as 0. Where a batch holds nothing else, the
    result is exactly 0; otherwise they get what 0 is worth, minus the batch's mean over its standard deviation.
    """
    counted = inputs.counted()
    centred_B = centred(inputs.scores_B(), inputs.groups_B)
    return Advantages(counted.spread(whitened(centred_B[rows_of_tokens(counted.offsets_B1)])))
