"""Group relative policy optimisation: a sequence is judged against the other answers to its prompt.

Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; without the division by the standard deviation it is the
estimator of Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).

Shapes: _T flat response tokens, _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import group_statistics

STD_EPSILON = 1e-6

NEEDS: tuple[Need, ...] = ("group",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="grpo",
        advantage="grpo",
        policy_loss="ppo_clip",
        description="no critic: a prompt's samples are each other's baseline, scaled by their spread",
        paper="2402.03300",
    ),
    Algorithm(
        name="dr_grpo",
        advantage="grpo",
        policy_loss="ppo_clip",
        description="GRPO without what favours long answers and prompts of little spread",
        paper="2503.20783",
        aggregation="seq-mean-token-sum-norm",
        defaults={"normalize_by_std": False},
    ),
)


def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Advantages:
    """A = (R - mean of the group) / (std of the group + 1e-6) at every counted token of a row; no returns.

    R is the row's reward plus its counted token rewards; the standard deviation is unbiased. A group of one, and a
    group of equal rewards, teaches nothing: its advantage is exactly 0. A row without a counted token receives
    nothing but still counts in its group's statistics, for its reward was earned by the same policy.

    Args:
        inputs: a batch; ``values_T`` is not read.
        normalize_by_std: divide by the group's standard deviation; without it R - mean is left.

    Note:
        The standard deviation is unbiased.
    """
    group = group_statistics(inputs.scores_B(), inputs.groups_B)
    advantages_B = group.centred_B / (group.std_B + STD_EPSILON) if normalize_by_std else group.centred_B
    return spread_over_tokens(advantages_B, inputs)
