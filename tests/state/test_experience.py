"""Experience survives the way to disk and back row by row, and grows by columns without touching the others.

A process may be killed between any two of the steps in which it does so: a reader never sees columns of two rollouts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from penstock.base.ragged import Ragged, offsets_of
from penstock.state import experience
from penstock.state.experience import (
    add_columns,
    column_names,
    consolidate,
    read_columns,
    read_rows,
    with_parts,
    write_columns,
    write_columns_apart,
)

ROWS: list[list[int]] = [[1, 2, 3], [], [4], [5, 6]]


def _lists(column: Ragged) -> list[list[Any]]:
    return [column.row(index).tolist() for index in range(len(column))]


# ---- in memory -----------------------------------------------------------------------------------------------------


def _beside_marks(folder: Path) -> list[Path]:
    """What a folder holds, without the marks by which files are known to be whole."""
    return [path for path in folder.iterdir() if path.suffix != ".whole"]


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
    """In the order of the rows; what was there before is unchanged, the file itself too, which is why it is fast."""
    content = path.read_bytes()
    before = read_columns(path, ["response_tokens", "sample_id"])
    added = Ragged.of([[0.1, 0.2, 0.3], [], [0.4], [0.5, 0.6]], np.float32)
    add_columns(path, {"advantages": added, "reward": np.array([9.0, 8.0, 7.0, 6.0])})
    after = read_columns(path, ["response_tokens", "sample_id", "advantages", "reward"])
    assert _lists(after["response_tokens"]) == _lists(before["response_tokens"])
    assert after["sample_id"] == before["sample_id"]
    np.testing.assert_array_equal(after["advantages"].values_T, added.values_T)
    assert after["reward"].tolist() == [9.0, 8.0, 7.0, 6.0]
    assert column_names(path) == ["sample_id", "response_tokens", "loss_mask", "reward", "truncated", "advantages"]
    assert path.read_bytes() == content
    assert list(path.parent.glob("*.parquet")) == list(path.parent.glob("[!.]*")) == [path], "a part is not seen"


def test_a_column_of_another_length_is_refused_and_the_file_stays(path: Path) -> None:
    """Three values for four rows belong to another experience."""
    content = path.read_bytes()
    with pytest.raises(ValueError, match="length"):
        add_columns(path, {"reward": np.array([1.0, 2.0, 3.0])})
    assert path.read_bytes() == content
    assert _beside_marks(path.parent) == [path]


def test_a_missing_column_names_the_task_that_has_not_run(path: Path) -> None:
    """Not a crash deep inside an update."""
    with pytest.raises(KeyError, match="no column advantages"):
        read_columns(path, ["reward", "advantages"])


def test_pandas_shows_a_sample_as_one_row(path: Path) -> None:
    """The promise to whoever debugs a run: no tool of ours is needed."""
    frame = pd.read_parquet(path)
    sample = frame.to_dict("records")[3]
    assert (sample["sample_id"], list(sample["response_tokens"])) == ("b/1", [5, 6])


# ---- file and parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def rollout(tmp_path: Path) -> Path:
    """The file of a rollout, the first of those that `_rollout` makes."""
    write_columns(tmp_path / "000012.parquet", _rollout(1))
    return tmp_path / "000012.parquet"


def _rollout(number: int) -> dict[str, Any]:
    return {
        "prompt": [f"{number}-{row}" for row in range(4)],
        "response_tokens": Ragged.of([[number] * len(row) for row in ROWS], np.int32),
    }


def _added(number: int, *names: str) -> dict[str, Any]:
    return {name: np.full(4, float(number)) for name in names}


def _seen(path: Path) -> dict[str, Any]:
    """What a reader sees, as plain values."""
    return _values(read_columns(path, column_names(path)))


def _values(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: _lists(value) if isinstance(value, Ragged) else list(value) for name, value in columns.items()}


def test_of_a_column_in_several_parts_the_newest_wins(rollout: Path) -> None:
    """A task that is tried again writes again, also what the file itself has; whatever else a part holds stays."""
    add_columns(rollout, _added(1, "reward", "reward/format"))
    add_columns(rollout, _added(2, "reward") | {"prompt": ["other"] * 4})
    add_columns(rollout, _added(3, "advantages"))
    expected = _rollout(1) | {"prompt": ["other"] * 4} | _added(2, "reward") | _added(1, "reward/format")
    expected |= _added(3, "advantages")
    assert _seen(rollout) == _values(expected)
    assert column_names(rollout) == ["prompt", "response_tokens", "reward", "reward/format", "advantages"]
    consolidate(rollout)
    assert _seen(rollout) == _values(expected)


def test_a_new_rollout_leaves_nothing_of_the_old_one(rollout: Path) -> None:
    """Neither a column nor a file; what is added then belongs to it."""
    add_columns(rollout, _added(1, "reward", "advantages"))
    write_columns(rollout, _rollout(2))
    assert _beside_marks(rollout.parent) == [rollout]
    assert _seen(rollout) == _values(_rollout(2))
    add_columns(rollout, _added(2, "reward"))
    assert _seen(rollout) == _values(_rollout(2) | _added(2, "reward"))


def test_a_part_gives_back_every_kind_of_column_as_the_file_does(rollout: Path, tmp_path: Path) -> None:
    """Values and dtypes; nothing else tells that a column is from a part."""
    columns = {
        "advantages": Ragged.of(ROWS, np.float32),
        "empty": Ragged.of([[], [], [], []], np.uint8),
        "accepted": np.array([1, 0, 1, 1], np.uint8),
        "truncated": np.array([True, False, False, True]),
        "reward": np.array([0.5, np.nan, 0.0, 2.0]),
        "reward_failure": [None] * 4,
        "reward_answer": ["a", None, "", "\u00fc"],
    }
    add_columns(rollout, columns)
    write_columns(tmp_path / "file.parquet", columns)
    of_part, of_file = (read_columns(path, list(columns)) for path in (rollout, tmp_path / "file.parquet"))
    for name in columns:
        there, expected = of_part[name], of_file[name]
        assert type(there) is type(expected)
        if isinstance(expected, Ragged):
            assert there.offsets_B1.tolist() == expected.offsets_B1.tolist()
            there, expected = there.values_T, expected.values_T
        np.testing.assert_array_equal(there, expected, strict=isinstance(expected, np.ndarray))


def test_lists_and_texts_that_are_written_apart_read_as_one_with_the_file(path: Path, tmp_path: Path) -> None:
    """Also columns that are added then; consolidated it is the same as written at once, in another order of columns."""
    columns = read_columns(path, column_names(path))
    apart = tmp_path / "apart" / "000012.parquet"
    write_columns_apart(apart, columns)
    assert pq.read_schema(apart).names == ["reward", "truncated"]
    assert _seen(apart) == _values(columns)
    add_columns(apart, {"reward": np.array([9.0, 8.0, 7.0, 6.0])})
    add_columns(path, {"reward": np.array([9.0, 8.0, 7.0, 6.0])})
    for consolidated in (apart, path):
        consolidate(consolidated)
    assert with_parts(apart.parent) == []
    assert sorted(_bits(apart)) == sorted(_bits(path))


def test_after_a_restart_of_the_machine_parts_are_gone(rollout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waited until they had reached the disk. Control: the same boot sees them; the file itself is there."""
    write_columns_apart(rollout, APART)
    assert set(column_names(rollout)) == APART.keys()
    monkeypatch.setattr(experience, "_boot", lambda: "later")
    assert _seen(rollout) == {"group": [0, 0, 1, 1]}
    add_columns(rollout, _added(1, "reward"))
    consolidate(rollout)
    assert _seen(rollout) == _values({"group": [0, 0, 1, 1]} | _added(1, "reward"))
    assert with_parts(rollout.parent) == []


def test_a_file_that_something_else_wrote_takes_parts_too(tmp_path: Path) -> None:
    """One of an older version has no identity."""
    path = tmp_path / "000001.parquet"
    pd.DataFrame({"prompt": ["a", "b"]}).to_parquet(path)
    add_columns(path, {"reward": np.array([1.0, 2.0])})
    assert _seen(path) == {"prompt": ["a", "b"], "reward": [1.0, 2.0]}
    consolidate(path)
    assert pd.read_parquet(path).to_dict("list") == {"prompt": ["a", "b"], "reward": [1.0, 2.0]}


def test_consolidated_is_as_if_every_step_had_written_all_columns(path: Path, tmp_path: Path) -> None:
    """Types, order and every bit of every column, by Parquet alone; no part is left, and once more does nothing."""
    whole = tmp_path / "whole.parquet"
    whole.write_bytes(path.read_bytes())
    noise = np.random.default_rng(0).normal(size=6).astype(np.float32)
    steps: list[dict[str, Any]] = [
        {"reward": np.array([1.0, np.nan, 3.0, 4.0]), "reward_failure": [None, "x", None, None]},
        {"reward_failure": [None] * 4, "accepted": np.array([1, 0, 1, 1], np.uint8)},
        {"advantages": Ragged(noise, offsets_of(np.array([3, 0, 1, 2])))},
    ]
    for columns in steps:
        add_columns(path, columns)
        table = pq.read_table(whole)
        for name, column in columns.items():
            array = experience.to_arrow(column)
            place = table.column_names.index(name) if name in table.column_names else table.num_columns
            table = table.remove_column(place) if name in table.column_names else table
            table = table.add_column(place, name, array)
        pq.write_table(table, whole)
    assert with_parts(path.parent) == [path]
    consolidate(path)
    assert _beside_marks(path.parent) == [path]
    assert _bits(path) == _bits(whole)
    content = path.read_bytes()
    consolidate(path)
    assert path.read_bytes() == content
    assert pd.read_parquet(path)["advantages"][3].tolist() == noise[4:].tolist()


def _bits(path: Path) -> list[tuple[Any, ...]]:
    table = pq.read_table(path)
    arrays = {name: table.column(name).combine_chunks() for name in table.column_names}
    return [
        (name, str(array.type), [None if buffer is None else buffer.to_pybytes() for buffer in array.buffers()])
        for name, array in arrays.items()
    ]


def test_parts_of_files_that_are_gone_go(rollout: Path) -> None:
    """Experience is the user's to delete."""
    add_columns(rollout, _added(1, "reward"))
    rollout.unlink()
    assert with_parts(rollout.parent) == [rollout]
    consolidate(rollout)
    assert _beside_marks(rollout.parent) == []


# ---- killed between any two steps, read at any moment --------------------------------------------------------------


class Killed(BaseException):
    """The process is dead."""


def _dies_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let a process take so many steps that the disk sees; none happens any more from the next one on."""
    count = itertools.count()

    def mortal(real: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: Any, **named: Any) -> None:
            if next(count) >= steps:
                raise Killed
            real(*arguments, **named)

        return step

    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, mortal(getattr(os, name)))


def _with_all(folder: Path) -> Path:
    """The first rollout with two parts, and one that belongs to nothing."""
    path = folder / "000012.parquet"
    write_columns(path, _rollout(0))
    add_columns(path, _added(0, "reward", "refused"))
    (orphan,) = folder.glob(".*.part")
    content = orphan.read_bytes()
    write_columns(path, _rollout(1))
    orphan.write_bytes(content)
    add_columns(path, _added(1, "reward"))
    add_columns(path, _added(2, "reward", "advantages"))
    return path


FULL = _values(_rollout(1) | _added(2, "reward", "advantages"))
APART = _rollout(2) | {"group": np.array([0, 0, 1, 1])}
STEPS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "write": (lambda path: write_columns(path, _rollout(2)), _values(_rollout(2))),
    "write apart": (lambda path: write_columns_apart(path, APART), _values(APART)),
    "add": (lambda path: add_columns(path, _added(3, "reward")), FULL | _values(_added(3, "reward"))),
    "consolidate": (consolidate, FULL),
}


def _seen_after_kills(tmp_path: Path, action: Callable[[Path], None]) -> list[tuple[Path, dict[str, Any]]]:
    """Kill `action` before each of its steps; return the files, the last of them undisturbed, and what readers see."""
    seen = []
    for steps in itertools.count():
        (tmp_path / str(steps)).mkdir()
        path = _with_all(tmp_path / str(steps))
        with pytest.MonkeyPatch.context() as patch:
            _dies_after(patch, steps)
            try:
                action(path)
            except Killed:
                alive = False
            else:
                alive = True
        seen.append((path, _seen(path)))
        if alive:
            return seen
    raise AssertionError


@pytest.mark.parametrize("name", STEPS)
def test_a_kill_at_any_step_leaves_the_old_columns_or_the_new(tmp_path: Path, name: str) -> None:
    """Whole either way, and what the kill left over does not matter to what comes then."""
    action, new = STEPS[name]
    seen = _seen_after_kills(tmp_path, action)
    assert len(seen) >= 3
    assert all(columns in (FULL, new) for _, columns in seen)
    assert (seen[0][1], seen[-1][1]) == (FULL, new)
    for path, _ in seen:
        action(path)
        assert _seen(path) == new
        consolidate(path)
        assert _seen(path) == new
        assert with_parts(path.parent) == []


def test_without_identities_a_kill_would_mix_two_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: where every file has the same identity, old rewards stand by new responses."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "same")
    action, new = STEPS["write"]
    seen = _seen_after_kills(tmp_path, action)
    assert any(columns not in (FULL, new) for _, columns in seen)


@pytest.mark.parametrize("identities", [True, False])
def test_a_reader_at_that_moment_does_not_join_two_rollouts(
    rollout: Path, monkeypatch: pytest.MonkeyPatch, identities: bool
) -> None:
    """It has opened the file when a new rollout and its rewards are written. Control: with equal identities it does."""
    if not identities:
        monkeypatch.setattr("secrets.token_hex", lambda _: "same")
        write_columns(rollout, _rollout(1))
    opened = experience._opened

    def overtaken(path: Path) -> pq.ParquetFile:
        file = opened(path)
        monkeypatch.setattr(experience, "_opened", opened)
        write_columns(path, _rollout(2))
        add_columns(path, _added(2, "reward"))
        return file

    monkeypatch.setattr(experience, "_opened", overtaken)
    if identities:
        with pytest.raises(KeyError, match="no column reward"):
            read_columns(rollout, ["prompt", "reward"])
        assert _seen(rollout) == _values(_rollout(2) | _added(2, "reward"))
    else:
        mixed = read_columns(rollout, ["prompt", "reward"])
        assert (mixed["prompt"][0], mixed["reward"][0]) == ("1-0", 2.0)


# ---- some rows alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0], [9, 0, 4, 4], [2, 3], [], list(range(10))])
@pytest.mark.parametrize("in_groups_of", [1, 3, 10])
def test_some_rows_are_those_of_the_whole_columns(tmp_path: Path, rows: list[int], in_groups_of: int) -> None:
    """In the order asked for, from a file of any row groups and from a part beside it."""
    path = tmp_path / "000001.parquet"
    tokens = Ragged.of([[row] * row for row in range(10)], np.int32)
    write_columns(path, {"reward": np.arange(10.0), "tokens": tokens, "text": [str(row) for row in range(10)]})
    pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=in_groups_of)
    add_columns(path, {"advantages": Ragged.of([[row / 2] * row for row in range(10)], np.float32)})
    names = ["text", "advantages", "tokens", "reward"]
    whole, some = read_columns(path, names), read_rows(path, names, np.asarray(rows, np.int64))
    assert list(some) == names
    assert some["reward"].tolist() == whole["reward"][rows].tolist()
    assert some["text"] == [whole["text"][row] for row in rows]
    for name in ("tokens", "advantages"):
        assert _lists(some[name]) == [whole[name].row(row).tolist() for row in rows]


def test_row_groups_without_the_rows_are_not_decoded(tmp_path: Path) -> None:
    """One is damaged: rows of others come all the same. Control: its own do not."""
    path = tmp_path / "000001.parquet"
    write_columns(path, {"text": [chr(97 + row) * 1000 for row in range(4)]})
    pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=1, compression="none", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 40] = b"x" * 40
    path.write_bytes(content)
    assert read_rows(path, ["text"], np.array([3, 0]))["text"] == ["d" * 1000, "a" * 1000]
    with pytest.raises(OSError):
        read_rows(path, ["text"], np.array([2]))


def test_a_row_of_a_column_that_is_absent_says_so(tmp_path: Path) -> None:
    """Before anything is decoded."""
    path = tmp_path / "000001.parquet"
    write_columns(path, {"reward": np.zeros(2)})
    with pytest.raises(KeyError, match="no column advantages"):
        read_rows(path, ["reward", "advantages"], np.array([0]))
