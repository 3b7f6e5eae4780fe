"""Rows of experience go together whole, whatever their columns are made of."""

from __future__ import annotations

import numpy as np

from penstock.base.ragged import Ragged
from penstock.state.columns import joined, taken


def test_rows_are_put_behind_each_other_and_taken_with_all_their_columns() -> None:
    """Lists of tokens, numbers and texts; of a number or a text that one part lacks nothing is there."""
    first = {"group": np.asarray([0, 1]), "tokens": Ragged.of([[1, 2], []], np.int32), "text": ["a", "b"]}
    second = {
        "group": np.asarray([0]),
        "tokens": Ragged.of([[3]], np.int32),
        "text": ["c"],
        "part": np.asarray([0.5]),
        "answer": ["yes"],
    }
    both = joined([first, second], ["group", "tokens", "text", "part", "answer"])
    assert both["group"].tolist() == [0, 1, 0] and both["text"] == ["a", "b", "c"]
    assert [both["tokens"].row(row).tolist() for row in range(3)] == [[1, 2], [], [3]]
    np.testing.assert_array_equal(both["part"], [np.nan, np.nan, 0.5])
    assert both["answer"] == [None, None, "yes"]

    some = taken(both, np.asarray([2, 0]))
    assert [some["tokens"].row(row).tolist() for row in range(2)] == [[3], [1, 2]]
    assert (some["text"], some["answer"], some["group"].tolist()) == (["c", "a"], ["yes", None], [0, 0])
