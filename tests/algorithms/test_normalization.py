"""Group statistics and whitening against numbers worked out by hand.

Invariant: equal values are exactly 0 after centring, whatever their value.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.algorithms.normalization import group_statistics, whitened


def test_group_statistics_by_hand_for_interleaved_groups() -> None:
    """Group 7: 1, 2, 6 has mean 3, squares 4 + 1 + 9 = 14, variance 14 / 2 = 7. Group 2: 5 alone."""
    group = group_statistics(np.array([1.0, 5.0, 2.0, 6.0]), np.array([7, 2, 7, 7]))
    np.testing.assert_allclose(group.centred_B, [-2, 0, -1, 3], atol=1e-15)
    np.testing.assert_allclose(group.std_B, [7**0.5, 0, 7**0.5, 7**0.5], atol=1e-15)
    assert group.sizes_B.tolist() == [3, 1, 3, 3]


def test_equal_values_are_exactly_zero_where_a_plain_mean_is_not() -> None:
    """Three times 0.1 sum to 0.30000000000000004; negative control: its third is not 0.1."""
    values_B = np.array([0.1, 0.1, 0.1])
    assert (values_B - sum(values_B.tolist()) / 3).any()
    group = group_statistics(values_B, np.zeros(3, dtype=int))
    assert group.centred_B.tolist() == [0, 0, 0]
    assert group.std_B.tolist() == [0, 0, 0]


def test_group_statistics_of_no_rows() -> None:
    assert group_statistics(np.zeros(0), np.zeros(0, dtype=int)).centred_B.size == 0


def test_whitened_by_hand() -> None:
    """1, 3, 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4, so -1, 0, 1 (within the 1e-8)."""
    np.testing.assert_allclose(whitened(np.array([1.0, 3.0, 5.0])), [-1, 0, 1], atol=1e-8)


def test_control_the_variance_is_unbiased() -> None:
    """Negative control: dividing by n instead of n - 1 gives 1.22, not 1."""
    assert abs(2 / np.array([1.0, 3.0, 5.0]).std() - whitened(np.array([1.0, 3.0, 5.0]))[2]) > 0.2


@pytest.mark.parametrize("values", [[], [4.0], [4.0, 4.0], [0.1, 0.1, 0.1]])
def test_whitened_without_spread_is_zero(values: list[float]) -> None:
    assert whitened(np.array(values)).tolist() == [0.0] * len(values)
