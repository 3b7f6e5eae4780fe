"""ReMax: the policy's own greedy answer to a prompt is the baseline of its sampled ones.

Source: Li et al. 2024 (arXiv 2310.10505).

Shapes: _C counted tokens, _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.segments import discounted_sums, rows_of_tokens

NEEDS: tuple[Need, ...] = ("greedy",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="remax",
        advantage="remax",
        policy_loss="ppo_clip",
        description="no critic and no groups: the reward of a greedy response is the baseline",
        paper="2310.10505",
        aggregation="seq-mean-token-sum",
    ),
)


def remax(inputs: AdvantageInputs) -> Advantages:
    """A_t = reward still to come - reward of the greedy response, over counted tokens.

    A row that earns what the greedy response earns gets exactly 0 (without token rewards).

    Note:
        It takes one more response per prompt and iteration; the figure is ``reward/greedy_mean``.

    Raises:
        ValueError: ``inputs.baselines_B`` is None.
    """
    if inputs.baselines_B is None:
        raise ValueError("remax needs the rewards of greedy responses, and the inputs hold none")
    counted = inputs.counted()
    returns_C = discounted_sums(counted.rewards_C, counted.offsets_B1, 1.0)
    return Advantages(counted.spread(returns_C - inputs.baselines_B[rows_of_tokens(counted.offsets_B1)]))
