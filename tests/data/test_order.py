"""Order: a resumed run takes the prompts an uninterrupted one would have taken.

Invariants: every epoch is a permutation; the ordinals decide alone, however they are cut into iterations; the order
is the same in every process and under every NumPy version.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.data.order import epoch_order, take


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_epoch_takes_each_row_once(size: int, shuffle: bool) -> None:
    """A permutation, whatever the epoch."""
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(epoch_order(size, 5, epoch, shuffle)), np.arange(size))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    """Shuffled: another order for another epoch or seed, the same for the same. Not shuffled: file order."""
    first = epoch_order(100, 1, 0, True)
    np.testing.assert_array_equal(first, epoch_order(100, 1, 0, True))
    assert not np.array_equal(first, epoch_order(100, 1, 1, True))
    assert not np.array_equal(first, epoch_order(100, 2, 0, True))
    np.testing.assert_array_equal(epoch_order(100, 1, 3, False), np.arange(100))


def test_the_order_is_pinned() -> None:
    """Recorded values: a change here would break the resuming of runs that were begun before it."""
    assert epoch_order(8, 0, 0, True).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_cutting_into_iterations_changes_nothing(count: int, shuffle: bool) -> None:
    """Iterations of any length, also across epochs and longer than the table, line up to the same sequence."""
    size, seed = 10, 3
    whole = np.concatenate([epoch_order(size, seed, epoch, shuffle) for epoch in range(10)])
    pieces = [take(cursor, count, size, seed, shuffle) for cursor in range(0, 75, count)]
    assert all(len(piece) == count for piece in pieces)
    joined = np.concatenate(pieces)
    np.testing.assert_array_equal(joined, whole[: len(joined)])


def test_resuming_in_the_middle_of_an_epoch() -> None:
    """From any cursor the sequence goes on as if it had never stopped."""
    whole = take(0, 40, 7, 9, True)
    for cursor in range(30):
        np.testing.assert_array_equal(take(cursor, 10, 7, 9, True), whole[cursor : cursor + 10])
