"""Rows: both formats give the same frame, and a mistake in a file is named by its line.

Invariant: row i of the frame is row i of the file, with the values as they are written there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.base.errors import UserError
from penstock.data.rows import read_rows, require_columns, require_filled

ROWS: list[dict[str, Any]] = [
    {"prompt": "2024-01-01", "answer": "046", "level": 1, "note": None},
    {"prompt": "a\u2028b", "answer": "1e5", "level": None, "note": "x"},
    {"prompt": "é", "answer": "true", "level": 3, "note": "y"},
]


def _jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_and_parquet_give_the_same_values(tmp_path: Path) -> None:
    """Text stays text (dates, numbers with leading zeros, line separators), integers with gaps stay integers."""
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    for path in (_jsonl(tmp_path / "rows.jsonl", ROWS), parquet):
        rows = read_rows(path).to_dict("records")
        assert rows == ROWS
        assert type(rows[0]["level"]) is int


def test_blank_lines_at_the_end_do_not_count(tmp_path: Path) -> None:
    """Editors leave them."""
    path = _jsonl(tmp_path / "rows.jsonl", ROWS)
    path.write_text(path.read_text(encoding="utf-8") + "\r\n\n", encoding="utf-8")
    assert len(read_rows(path)) == len(ROWS)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": 1}', '{"a": "2', '{"a": 3}'], "line 2 is not JSON: Unterminated string starting at column 7\n"),
        (['{"a": 1}', '{"a": 2', '{"a": 3}'], r"line 2 is not JSON: Expecting .* at column 8\n"),
        (['{"a": 1}', '{"a": ' + "1" * 5000 + "}"], "line 2 is not JSON: Exceeds the limit"),
        (['{"a": 1', '"b": 2}'], "line 1 is not JSON"),
        (['{"a": 1, "b": 2}', '{"a": 1, "b": 2, "a": 1}'], "line 2 has the key 'a' twice\n  remove one"),
        (['{"a": [{"b": 1, "c": 2, "b": 3}]}'], "line 1 has the key 'b' twice"),
        (['{"a": 1}', "", '{"a": 3}'], "line 2 is blank"),
        (['{"a": 1}', "[1]"], "line 2 is not a JSON object but a list"),
        (['{"a": 1, "b": 2}', '{"a": 1}'], r"line 2: column 'b' is missing \(line 1 has it\)"),
        (['{"a": 1}', '{"a": 1}', '{"a": 1, "b": 2}'], r"line 1: column 'b' is missing \(line 3 has it\)"),
        (['{"a": 1}', '{"a": null}', '{"a": "x"}'], "line 3: column 'a' has more than one type: text follows a number"),
        (['{"a": 1}', '{"a": 1.5}', '{"a": []}'], "line 3: .* a list follows a number"),
        (['{"a": {"b": 1}}', '{"a": {"b": "x"}}'], "column 'a' has more than one type"),
        (['{"a": {}}', '{"a": {}}'], "column 'a' holds objects that are empty in every row"),
        (['{"a": [{"b": {}}]}'], "column 'a' holds objects that are empty in every row"),
        ([f'{{"a": {2**70}}}'], "column 'a' has more than one type"),
        (['{"a": 1}', '{"a": "\udcff"}'], "line 2 is not JSON(.|\n)*save the file as UTF-8"),
        (['{"a": "x"}', '{"a": "y\\ud800"}'], r"line 2 has '\\ud800', which is half a character"),
        (['{"a": ["x"], "b": {"c": "\\uDFFF\\ud800"}}'], r"line 1 has '\\udfff', which is half a character"),
        (['{"a": 1}', '{"\\ud800": 1}'], r"line 2 has '\\ud800', which is half a character"),
        (['{"a": 1}', '{"a": "\udced\udca0\udc80"}'], "line 2 is not JSON(.|\n)*save the file as UTF-8"),
        (['{"a": 1}', f'{{"a": {"[" * 100_000}'], "line 2 is nested more than 32 deep"),
        (['{"a": 1}', f'{{"a": {"[" * 100_000}{"]" * 100_000}}}'], "line 2 is nested more than 32 deep"),
        (['{"a": 1}', f'{{"a": {"[" * 32}1{"]" * 32}}}'], "line 2 is nested more than 32 deep"),
        ([f'{{"a": {"""{"b": """ * 32}1{"}" * 32}}}'], "line 1 is nested more than 32 deep"),
        ([], "has no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    """Also two broken lines that would be one good object if they were joined."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=rf"bad\.jsonl.*{message}"):
        read_rows(path)


def test_whole_characters_and_what_parquet_can_nest_are_kept(tmp_path: Path) -> None:
    """The controls of the refusals above: both halves of a character, a backslash before them, 31 lists in a row."""
    text = '{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": ' + "[" * 31 + "1" + "]" * 31 + "}"
    (tmp_path / "rows.jsonl").write_text(text)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert (rows["a"][0], rows["b"][0]) == ("\U0001f600", "\\ud800")
    pq.write_table(pa.Table.from_pandas(rows), tmp_path / "rows.parquet")
    assert str(read_rows(tmp_path / "rows.parquet")["c"][0]) == str(rows["c"][0])


def test_text_of_a_parquet_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Half a character, or another encoding. Control: the same bytes as bytes, which is what they are."""
    halves = pa.array([b"x", b"\xed\xa0\x80"])
    pq.write_table(pa.table({"a": halves}), tmp_path / "bytes.parquet")
    assert read_rows(tmp_path / "bytes.parquet")["a"].tolist() == [b"x", b"\xed\xa0\x80"]
    text = pa.Array.from_buffers(pa.string(), 2, halves.buffers())
    pq.write_table(pa.table({"a": text}), tmp_path / "text.parquet")
    with pytest.raises(UserError, match="has text that is no UTF-8"):
        read_rows(tmp_path / "text.parquet")


def test_files_that_are_not_data_are_refused(tmp_path: Path) -> None:
    """Missing, of another kind, with a column twice, empty, or not what the name says."""
    with pytest.raises(UserError, match="does not exist"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"neither \.jsonl nor \.parquet"):
        read_rows(tmp_path / "rows.csv")
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 3, ["a", "b", "b"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="has the column 'b' twice"):
        read_rows(tmp_path / "twice.parquet")
    (tmp_path / "text.parquet").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is not a Parquet file"):
        read_rows(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(tmp_path / "empty.parquet")


def test_a_missing_column_names_the_nearest() -> None:
    """And lists the columns there are; present ones pass."""
    frame = pd.DataFrame({"question": ["a"], "answer": ["b"]})
    require_columns(frame, ["question", "answer"], "x.jsonl")
    with pytest.raises(
        UserError, match=r"no column 'questoin'\n  did you mean 'question'\? its columns are: question, ans"
    ):
        require_columns(frame, ["answer", "questoin"], "x.jsonl")


@pytest.mark.parametrize(("value", "what"), [(None, "null"), ("", "empty"), (" \n", "empty"), ([], "empty")])
def test_an_empty_value_is_named_by_its_line(value: object, what: str) -> None:
    """Lines count from 1, as in an editor; a Parquet file has rows."""
    frame = pd.DataFrame({"prompt": ["a", value, "c"]}, dtype=object)
    with pytest.raises(UserError, match=f"x.jsonl, line 2: 'prompt' is {what}"):
        require_filled(frame, "prompt", "x.jsonl")
    with pytest.raises(UserError, match=f"x.parquet, row 2: 'prompt' is {what}"):
        require_filled(frame, "prompt", "x.parquet")
    require_filled(frame.drop(index=1), "prompt", "x.jsonl")


def test_numbers_are_no_text() -> None:
    """A column of numbers is not silently turned into text."""
    with pytest.raises(UserError, match="line 1: 'prompt' is 3, which is no text"):
        require_filled(pd.DataFrame({"prompt": [3]}), "prompt", "x.jsonl")


def test_an_object_may_be_empty_in_some_rows(tmp_path: Path) -> None:
    """The control of the refusal above; so may a list be in all of them."""
    frame = read_rows(_jsonl(tmp_path / "rows.jsonl", [{"a": {}, "b": []}, {"a": {"c": 1}, "b": []}]))
    assert [dict(value) for value in frame["a"]] == [{"c": None}, {"c": 1}]
