"""Experience survives the way to disk and back row by row, and grows by columns without touching the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from state.experience import Ragged, add_columns, column_names, offsets_of, read_columns, write_columns

ROWS: list[list[int]] = [[1, 2, 3], [], [4], [5, 6]]


def _lists(column: Ragged) -> list[list[Any]]:
    return [column.row(index).tolist() for index in range(len(column))]


# ---- in memory -----------------------------------------------------------------------------------------------------


def test_a_ragged_column_holds_its_rows_flat() -> None:
    """Values one after the other, offsets between them; empty rows and no rows at all included."""
    column = Ragged.of(ROWS, np.int32)
    assert column.values_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert column.offsets_B1.tolist() == [0, 3, 3, 4, 6]
    assert (column.lengths_B.tolist(), len(column), column.values_T.dtype) == ([3, 0, 1, 2], 4, np.int32)
    assert _lists(column) == ROWS
    nothing = Ragged.of([], np.float32)
    assert (len(nothing), nothing.values_T.dtype, nothing.offsets_B1.tolist()) == (0, np.float32, [0])
    assert offsets_of(np.array([2, 0, 1])).tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("index", [[3, 2, 1, 0], [0, 0, 3], [1], [], [2, 0, 3, 1]])
def test_take_gives_the_rows_asked_for_in_that_order(index: list[int]) -> None:
    """Repeats and empty rows too; sorting by a permutation and back restores the column."""
    column = Ragged.of(ROWS, np.int32)
    taken = column.take(np.array(index, dtype=np.int64))
    assert _lists(taken) == [ROWS[row] for row in index]
    assert taken.offsets_B1[0] == 0
    if sorted(index) == [0, 1, 2, 3]:
        assert _lists(taken.take(np.argsort(index))) == ROWS


# ---- on disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An experience file with every kind of column."""
    path = tmp_path / "experience" / "000012.parquet"
    write_columns(
        path,
        {
            "sample_id": ["a/0", "a/1", "b/0", "b/1"],
            "response_tokens": Ragged.of(ROWS, np.int32),
            "loss_mask": Ragged.of([[1, 1, 0], [], [1], [0, 1]], np.uint8),
            "reward": np.array([0.5, -1.0, 0.0, 2.0]),
            "truncated": np.array([True, False, False, True]),
        },
    )
    return path


def test_every_kind_of_column_comes_back_as_it_went(path: Path) -> None:
    """Dtypes included: a mask that came back as floats or tokens as int64 would still look right."""
    columns = read_columns(path, ["response_tokens", "loss_mask", "reward", "sample_id", "truncated"])
    assert _lists(columns["response_tokens"]) == ROWS
    assert (columns["response_tokens"].values_T.dtype, columns["loss_mask"].values_T.dtype) == (np.int32, np.uint8)
    assert columns["response_tokens"].offsets_B1.dtype == np.int64
    assert columns["reward"].tolist() == [0.5, -1.0, 0.0, 2.0]
    assert columns["sample_id"] == ["a/0", "a/1", "b/0", "b/1"]
    assert list(columns["truncated"]) == [True, False, False, True]


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Log-probs decide ratios; a rounding on the way would make the first ratio not 1."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    column = Ragged(values, np.array([0, 400, 1000]))
    write_columns(tmp_path / "x.parquet", {"logprobs": column})
    np.testing.assert_array_equal(read_columns(tmp_path / "x.parquet", ["logprobs"])["logprobs"].values_T, values)


def test_columns_are_added_and_replaced_and_the_others_stay(path: Path) -> None:
    """In the order of the rows; what was there before is unchanged."""
    before = read_columns(path, ["response_tokens", "sample_id"])
    added = Ragged.of([[0.1, 0.2, 0.3], [], [0.4], [0.5, 0.6]], np.float32)
    add_columns(path, {"advantages": added, "reward": np.array([9.0, 8.0, 7.0, 6.0])})
    after = read_columns(path, ["response_tokens", "sample_id", "advantages", "reward"])
    assert _lists(after["response_tokens"]) == _lists(before["response_tokens"])
    assert after["sample_id"] == before["sample_id"]
    np.testing.assert_array_equal(after["advantages"].values_T, added.values_T)
    assert after["reward"].tolist() == [9.0, 8.0, 7.0, 6.0]
    assert column_names(path) == ["sample_id", "response_tokens", "loss_mask", "reward", "truncated", "advantages"]


def test_a_column_of_another_length_is_refused_and_the_file_stays(path: Path) -> None:
    """Three values for four rows belong to another experience."""
    content = path.read_bytes()
    with pytest.raises(ValueError, match="length"):
        add_columns(path, {"reward": np.array([1.0, 2.0, 3.0])})
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_missing_column_names_the_task_that_has_not_run(path: Path) -> None:
    """Not a crash deep inside an update."""
    with pytest.raises(KeyError, match="no column advantages"):
        read_columns(path, ["reward", "advantages"])


def test_pandas_shows_a_sample_as_one_row(path: Path) -> None:
    """The promise to whoever debugs a run: no tool of ours is needed."""
    frame = pd.read_parquet(path)
    sample = frame.to_dict("records")[3]
    assert (sample["sample_id"], list(sample["response_tokens"])) == ("b/1", [5, 6])
