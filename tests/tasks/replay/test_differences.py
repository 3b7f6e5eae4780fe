"""What counts as a difference: any bit of a column or figure, no second that a machine took."""

from __future__ import annotations

import numpy as np

from penstock.base.ragged import Ragged
from penstock.tasks.replay.differences import compared_columns, compared_figures, same_rows, table_of


def ragged(*rows: list[float]) -> Ragged:
    """Return rows as float32."""
    return Ragged.of([np.asarray(row, np.float32) for row in rows], np.float32)


def test_a_bit_is_a_difference_and_is_named_with_its_size() -> None:
    """NaN equals NaN; control: the same columns."""
    stored = {
        "reward": np.asarray([0.0, np.nan, 1.0]),
        "values": ragged([1.0], [2.0, 3.0]),
        "response": ["a", "b", "c"],
    }
    assert all(row.equal for row in compared_columns("t", stored, stored))
    other = {
        "reward": np.asarray([0.0, np.nan, 1.5]),
        "values": ragged([1.0], [2.0, np.nextafter(np.float32(3.0), np.float32(4.0))]),
        "response": ["a", "x", "y"],
    }
    found = {row.what: row.difference for row in compared_columns("t", stored, other)}
    assert found == {"reward": "1 of 3, at most 0.5", "values": "1 of 3, at most 2.38e-07", "response": "2 of 3 rows"}
    assert {row.difference for row in compared_columns("t", stored, other, tolerance=0.5)} == {"none", "2 of 3 rows"}


def test_a_number_that_became_nan_is_never_within_a_tolerance() -> None:
    """Nor is one that became infinite."""
    for odd in (np.nan, np.inf):
        (row,) = compared_columns("t", {"a": np.asarray([1.0, 2.0])}, {"a": np.asarray([1.0, odd])}, tolerance=9.0)
        assert not row.equal


def test_other_lengths_and_columns_of_one_side_are_differences() -> None:
    """Also where the numbers themselves are the same."""
    (row,) = compared_columns("t", {"a": ragged([1.0], [2.0])}, {"a": ragged([1.0, 2.0], [])})
    assert row.difference == "2 of 2 rows have other lengths"
    rows = compared_columns("t", {"a": np.zeros(1)}, {"b": np.zeros(1)})
    assert [(row.what, row.difference, row.equal) for row in rows] == [
        ("a", "only one has it", False),
        ("b", "only one has it", False),
    ]


def test_figures_are_compared_but_not_those_of_the_machine() -> None:
    """An iteration that was not recorded has none, which is no difference."""
    stored = {"actor/loss": 0.5, "time/update_actor_s": 1.0, "reward/mean": 1.0}
    again = {"actor/loss": 0.5, "actor/grad_norm": 2.0, "time/update_actor_s": 2.0, "actor/update_s": 3.0}
    found = [(row.what, row.difference, row.equal) for row in compared_figures("t", stored, again)]
    assert found == [("actor/loss", "none", True), ("actor/grad_norm", "not recorded", False)]
    assert all(row.equal for row in compared_figures("t", {}, again))
    (row,) = compared_figures("t", {"actor/loss": 0.5}, {"actor/loss": 0.505})
    assert (row.stored, row.replayed, row.difference, row.equal) == ("0.5", "0.505", "0.005", False)
    assert compared_figures("t", {"actor/loss": 0.5}, {"actor/loss": 0.505}, tolerance=0.02)[0].equal


def test_rows_that_a_refill_replaced_are_not_compared() -> None:
    """Rows are found by their name; groups have new numbers after a refill."""
    stored = {
        "sample_id": ["b", "x", "a"],
        "resample": np.asarray([0, 1, 0]),
        "group": np.asarray([0, 1, 2]),
        "tokens": ragged([2.0], [9.0], [1.0]),
    }
    again = {"sample_id": ["a", "b", "c"], "group": np.asarray([0, 1, 2]), "tokens": ragged([1.0], [2.0], [3.0])}
    before, after = same_rows(stored, again)
    assert all(row.equal for row in compared_columns("rollout", before, after))
    assert before["sample_id"] == ["b", "a"]
    assert same_rows({"sample_id": []}, again) == ({"sample_id": []}, again)


def test_the_table_names_each_task_once() -> None:
    """A heading for its rows."""
    rows = compared_figures("update_actor", {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0})
    assert table_of(rows).row_count == 3
