"""Segment helpers on ragged rows, with empty rows at the start, in the middle and at the end.

Invariant: each helper equals a loop over the rows' slices.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.algorithms.segments import lengths, rows_of_tokens, segment_sum, segment_sum_torch

OFFSETS_B1 = np.array([0, 0, 2, 2, 5, 6, 6])
VALUES_T = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
SUMS_B = [0.0, 3.0, 0.0, 12.0, 6.0, 0.0]


def test_lengths_and_rows_name_every_token_once() -> None:
    assert lengths(OFFSETS_B1).tolist() == [0, 2, 0, 3, 1, 0]
    assert rows_of_tokens(OFFSETS_B1).tolist() == [1, 1, 3, 3, 3, 4]
    assert lengths(torch.from_numpy(OFFSETS_B1)).tolist() == [0, 2, 0, 3, 1, 0]
    assert rows_of_tokens(torch.from_numpy(OFFSETS_B1)).tolist() == [1, 1, 3, 3, 3, 4]


def test_empty_rows_sum_to_zero() -> None:
    assert segment_sum(VALUES_T, OFFSETS_B1).tolist() == SUMS_B
    assert segment_sum_torch(torch.from_numpy(VALUES_T), torch.from_numpy(OFFSETS_B1)).tolist() == SUMS_B


def test_control_reduceat_alone_is_wrong_for_empty_rows() -> None:
    """Negative control: the obvious one-liner gives the next row's first element for an empty row."""
    naive_B = np.add.reduceat(VALUES_T, OFFSETS_B1[:-2])
    assert naive_B.tolist() != SUMS_B[:-1]


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_batches_without_a_token(offsets: list[int]) -> None:
    zeros = [0.0] * (len(offsets) - 1)
    assert segment_sum(np.zeros(0), np.array(offsets)).tolist() == zeros
    assert segment_sum_torch(torch.zeros(0), torch.tensor(offsets)).tolist() == zeros
    assert rows_of_tokens(np.array(offsets)).tolist() == []


def test_random_rows_equal_a_loop_over_slices() -> None:
    generator = np.random.default_rng(0)
    offsets_B1 = np.concatenate(([0], np.cumsum(generator.integers(0, 4, 200))))
    values_T = generator.normal(size=offsets_B1[-1])
    expected_B = [values_T[start:end].sum() for start, end in zip(offsets_B1[:-1], offsets_B1[1:], strict=True)]
    np.testing.assert_allclose(segment_sum(values_T, offsets_B1), expected_B, rtol=0, atol=1e-12)
    sums_B = segment_sum_torch(torch.from_numpy(values_T), torch.from_numpy(offsets_B1))
    np.testing.assert_allclose(sums_B.numpy(), expected_B, rtol=0, atol=1e-12)


def test_sums_of_float32_are_taken_in_float64() -> None:
    """2^24 + 1 is not a float32."""
    assert segment_sum(np.array([2.0**24, 1.0], dtype=np.float32), np.array([0, 2])).tolist() == [2.0**24 + 1]


def test_torch_sum_has_the_right_gradient() -> None:
    values_T = torch.from_numpy(VALUES_T).requires_grad_()
    offsets_B1 = torch.from_numpy(OFFSETS_B1)
    assert torch.autograd.gradcheck(lambda x: segment_sum_torch(x, offsets_B1) ** 2, (values_T,))
