"""Rows from JSONL or Parquet files, checked so that a mistake in the data is named by file and line.

Both formats go through Arrow: every column has one type, and integers with gaps stay integers.

Left out: what the columns mean (penstock/data/prompts.py, penstock/data/sft.py), and downloading data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.base.errors import UserError
from penstock.base.names import nearest_name

MOST_NESTED = 32  # lists and objects inside each other; Arrow's files take a hundred, printing a row fewer
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character, or one of the two halves of a whole one
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a JSONL or Parquet file; row i of the frame is row i of the file.

    Raises:
        UserError: the file is missing, empty, of another kind, or a row is wrong (named by its line).
    """
    return rows_in(read_content(path), path)


def read_content(path: Path) -> bytes:
    """Return the bytes of a data file.

    Raises:
        UserError: the file is missing or of another kind.
    """
    if path.suffix not in _READERS:
        raise UserError(f"{path} is neither .jsonl nor .parquet", "convert it, one row per line or per table row")
    if not path.is_file():
        raise UserError(
            f"the data file {path} does not exist", "check the path; it is relative to the working directory"
        )
    return path.read_bytes()


def rows_in(content: bytes, path: Path) -> pd.DataFrame:
    """Return the rows in the bytes of a data file, whose name says of which kind they are; see `read_rows`.

    Raises:
        UserError: there is no row, or one is wrong (named by its line).
    """
    table = _READERS[path.suffix](content, path)
    if table.num_rows == 0:
        raise UserError(f"{path} has no rows", "give a file with at least one row")
    return to_frame(table)


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return a table as a frame; where text or an integer is null it is None, never NaN."""
    frame = table.to_pandas(integer_object_nulls=True)
    for name in frame.select_dtypes("string"):
        if frame[name].hasnans:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
    return frame


def place(source: Path | str, row: int) -> str:
    """Name a row the way an editor shows it: line numbers for JSONL, both counted from 1."""
    return f"{source}, {'line' if str(source).endswith('.jsonl') else 'row'} {row + 1}"


def require_columns(frame: pd.DataFrame, names: Sequence[str], source: Path | str) -> None:
    """Check that columns exist.

    Raises:
        UserError: one is absent; names the nearest column.
    """
    columns = [str(column) for column in frame.columns]
    for name in names:
        if name in columns:
            continue
        near = nearest_name(name, columns)
        guess = f"did you mean '{near}'? " if near else ""
        raise UserError(f"{source} has no column '{name}'", f"{guess}its columns are: {', '.join(columns)}")


def require_filled(frame: pd.DataFrame, name: str, source: Path | str) -> None:
    """Check that a column of text or lists has no null and no empty value.

    Raises:
        UserError: names the first row at fault.
    """
    for row, value in enumerate(frame[name]):
        if not hasattr(value, "__len__"):
            what = "null" if pd.isna(value) else f"{value!r}, which is no text"
            raise UserError(f"{place(source, row)}: '{name}' is {what}", "correct the row or remove it")
        if len(value) == 0 or (isinstance(value, str) and not value.strip()):
            raise UserError(f"{place(source, row)}: '{name}' is empty", "correct the row or remove it")


def _read_jsonl(content: bytes, path: Path) -> pa.Table:
    # Bytes, because str.splitlines also splits at characters that may stand inside a JSON string.
    lines = content.rstrip().split(b"\n")
    if lines == [b""]:
        return pa.table({})
    rows = [_parse_line(path, row, line) for row, line in enumerate(lines)]
    for row, values in enumerate(rows):
        if values.keys() != rows[0].keys():
            name = next(iter(values.keys() ^ rows[0].keys()))
            lacking, having = (row, 0) if name in rows[0] else (0, row)
            raise UserError(
                f"{place(path, lacking)}: column '{name}' is missing (line {having + 1} has it)",
                "give every row the same columns; null where there is no value",
            )
    return pa.table({name: _column(path, name, [values[name] for values in rows]) for name in rows[0]})


def _in_words(error: ValueError) -> str:
    """Return what JSON's reader says of a line; it would count lines as well, within this one."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)  # of a number of thousands of digits
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


class _KeyTwice(ValueError):
    """An object has a key twice."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's keys with their values, where JSON's reader alone would keep the last of two equal keys.

    Raises:
        _KeyTwice: names the key.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _KeyTwice(_given_twice([name for name, _ in pairs])[0])
    return values


def _given_twice(names: Sequence[str]) -> list[str]:
    return [name for name in names if names.count(name) > 1]


def _parse_line(path: Path, row: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_each_key_once)
    except UnicodeDecodeError as error:
        raise UserError(f"{place(path, row)} is not JSON: {error}", "save the file as UTF-8") from None
    except RecursionError:
        raise _nested_too_deeply(path, row) from None
    except _KeyTwice as error:
        raise UserError(f"{place(path, row)} has the key {str(error)!r} twice", "remove one") from None
    except ValueError as error:
        what = "is blank" if not line.strip() else f"is not JSON: {_in_words(error)}"
        raise UserError(f"{place(path, row)} {what}", "each line holds one JSON object") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{place(path, row)} is not a JSON object but a {type(values).__name__}", 'write {"column": value, ...}'
        )
    if line.count(b"[") + line.count(b"{") > MOST_NESTED and _is_nested_deeper(values, MOST_NESTED):
        raise _nested_too_deeply(path, row)
    if _SURROGATE.search(line):
        _refuse_half_characters(path, row, values)
    return values


def _nested_too_deeply(path: Path, row: int) -> UserError:
    return UserError(f"{place(path, row)} is nested more than {MOST_NESTED} deep", "correct the row or remove it")


def _is_nested_deeper(value: Any, levels: int) -> bool:
    inside = [value]
    for _ in range(levels):
        inside = [part for item in inside for part in (item.values() if isinstance(item, dict) else item)]
        inside = [part for part in inside if isinstance(part, dict | list)]
    return bool(inside)


def _refuse_half_characters(path: Path, row: int, values: dict[str, Any]) -> None:
    r"""Refuse text that is none: JSON can write half of a character as `\ud800`, and UTF-8 cannot.

    Raises:
        UserError: names the row.
    """
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"{place(path, row)} has '{half}', which is half a character", "correct the text or remove the row"
        ) from None


def _column(path: Path, name: str, values: list[Any]) -> pa.Array:
    array = _array(path, name, values)
    if _has_empty_object(array.type):
        raise UserError(
            f"{path}: column '{name}' holds objects that are empty in every row, and a Parquet file cannot keep those",
            "remove them, or give them a key in some row",
        )
    return array


def _has_empty_object(kind: pa.DataType) -> bool:
    """Whether a type is an object without keys, or holds one."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_object(kind.field(index).type) for index in range(kind.num_fields))


def _array(path: Path, name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        kinds = [
            (row, _KINDS.get(type(value), type(value).__name__))
            for row, value in enumerate(values)
            if value is not None
        ]
        others = [(row, kind) for row, kind in kinds if kind != kinds[0][1]]
        where = f"{place(path, others[0][0])}: " if others else f"{path}: "
        what = f"{others[0][1]} follows {kinds[0][1]}" if others else str(error)
        raise UserError(
            f"{where}column '{name}' has more than one type: {what}", "write one type in every row, for instance text"
        ) from None


def _read_parquet(content: bytes, path: Path) -> pa.Table:
    try:
        if names := _given_twice(pq.read_schema(pa.BufferReader(content)).names):
            raise UserError(f"{path} has the column '{names[0]}' twice", "remove one")
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is not a Parquet file: {error}", "write it anew, or rename it if it is JSONL"
        ) from None
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} has text that is no UTF-8, or is damaged: {error}", "write it anew") from None
    return table


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
