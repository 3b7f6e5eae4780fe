"""GRPO against numbers worked out by hand and a loop over groups.

Invariants: a group's advantages sum to 0; equal rewards and groups of one give exactly 0; masked tokens get 0.
"""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest

from penstock.algorithms.advantages.groups.grpo import grpo
from penstock.algorithms.advantages.types import AdvantageInputs

# Five rows of lengths 2, 3, 0, 1, 2; the second is multi-turn, its middle token an observation.
INPUTS = AdvantageInputs(
    rewards_B=np.array([1.0, 2.0, 6.0, 5.0, 3.0], dtype=np.float32),
    token_rewards_T=np.zeros(8),
    mask_T=np.array([1, 1, 1, 0, 1, 1, 1, 0]),
    offsets_B1=np.array([0, 2, 5, 5, 6, 8]),
    groups_B=np.array([0, 0, 0, 1, 2]),
)


def test_by_hand() -> None:
    """Group 0: rewards 1, 2, 6, mean 3, std sqrt((4 + 1 + 9) / 2) = 2.6457513. Row 2 has no token but counts."""
    low, middle = -2 / 2.6457513110645906, -1 / 2.6457513110645906
    result = grpo(INPUTS)
    np.testing.assert_allclose(result.advantages_T, [low, low, middle, 0, middle, 0, 0, 0], rtol=1e-6)
    assert result.advantages_T.dtype == np.float32
    assert result.returns_T is None


def test_without_std_by_hand() -> None:
    assert grpo(INPUTS, normalize_by_std=False).advantages_T.tolist() == [-2, -2, -1, 0, -1, 0, 0, 0]


def test_token_rewards_by_hand() -> None:
    """0.5 at a counted token of row 1 makes it 2.5, the mean 9.5 / 3; 100 at its observation is not counted."""
    token_rewards_T = np.array([0, 0, 0.5, 100, 0, 0, 0, 0])
    result = grpo(dataclasses.replace(INPUTS, token_rewards_T=token_rewards_T), normalize_by_std=False)
    np.testing.assert_allclose(result.advantages_T[:3], [1 - 9.5 / 3, 1 - 9.5 / 3, 2.5 - 9.5 / 3], rtol=1e-6)


def test_a_fully_masked_row_counts_in_the_group_and_receives_nothing() -> None:
    masked = dataclasses.replace(INPUTS, mask_T=np.array([1, 1, 0, 0, 0, 1, 1, 0]))
    advantages_T = grpo(masked).advantages_T
    assert advantages_T[2:5].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(advantages_T[:2], grpo(INPUTS).advantages_T[:2])


@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6 / 3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    equal = dataclasses.replace(INPUTS, rewards_B=np.full(5, reward), groups_B=np.zeros(5, dtype=int))
    assert not grpo(equal).advantages_T.any()


def test_control_one_better_answer_is_enough() -> None:
    """Negative control for the test above."""
    rewards_B = np.array([0.1, 0.1, 0.1, 0.1, 0.2])
    advantages_T = grpo(dataclasses.replace(INPUTS, rewards_B=rewards_B, groups_B=np.zeros(5, dtype=int))).advantages_T
    assert (advantages_T[INPUTS.mask_T > 0] != 0).all()


def test_ragged_batch_equals_a_loop_over_groups() -> None:
    generator = np.random.default_rng(1)
    offsets_B1 = np.concatenate(([0], np.cumsum(generator.integers(0, 6, 60))))
    tokens = offsets_B1[-1]
    inputs = AdvantageInputs(
        rewards_B=generator.normal(size=60),
        token_rewards_T=generator.normal(size=tokens),
        mask_T=(generator.random(tokens) < 0.7).astype(np.float32),
        offsets_B1=offsets_B1,
        groups_B=generator.integers(-3, 17, 60),
    )
    expected_T = np.zeros(tokens)
    spans = [slice(*offsets_B1[row : row + 2]) for row in range(60)]
    scores = [
        inputs.rewards_B[row] + sum((inputs.token_rewards_T * inputs.mask_T)[span]) for row, span in enumerate(spans)
    ]
    for group in set(inputs.groups_B.tolist()):
        rows = np.flatnonzero(inputs.groups_B == group)
        mean = statistics.fmean(scores[row] for row in rows)
        std = statistics.stdev(scores[row] for row in rows) if len(rows) > 1 else 0.0
        for row in rows:
            expected_T[spans[row]] = (scores[row] - mean) / (std + 1e-6) * inputs.mask_T[spans[row]]
    np.testing.assert_allclose(grpo(inputs).advantages_T, expected_T, rtol=1e-6, atol=1e-7)


def test_advantages_of_a_group_sum_to_zero_over_its_rows() -> None:
    full = dataclasses.replace(
        INPUTS, token_rewards_T=np.zeros(5), mask_T=np.ones(5), offsets_B1=np.arange(6), groups_B=np.zeros(5, dtype=int)
    )
    assert abs(grpo(full).advantages_T.sum()) < 1e-6
