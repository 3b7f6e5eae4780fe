"""Rows of different lengths, one column after the other."""

from __future__ import annotations

import numpy as np

from penstock.base.ragged import Ragged


def test_parts_become_one_column_with_their_rows_in_order() -> None:
    """Empty rows and empty parts too. Control: in another order it is another column."""
    parts = [Ragged.of(rows, np.int32) for rows in ([[1, 2], []], [], [[3]])]
    joined = Ragged.concatenated(parts)
    assert [joined.row(row).tolist() for row in range(len(joined))] == [[1, 2], [], [3]]
    assert joined.values_T.dtype == np.int32
    assert Ragged.concatenated(parts[::-1]).row(0).tolist() == [3]
