"""Experience on disk and in memory: one row per sample, ragged list columns, nothing padded.

A file `experience/000012.parquet` grows by columns: rollout writes the first ones, each later task adds its own by
writing a new file and renaming it over the old one. So any task can run again from its inputs, and
`pandas.read_parquet` shows a sample's way from prompt to advantage.

In memory a list column is a `Ragged`: flat values plus offsets (B+1). Tasks pass `ExperienceRef`, never tokens.
Suffixes: `_B` rows, `_B1` offsets (B+1 entries), `_T` flat tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state.files import replacing

AGENT = "agent"  # column with the number of the agent that a row is for, where there are several


@dataclass(frozen=True)
class Ragged:
    """A list column: row i is `values_T[offsets_B1[i]:offsets_B1[i + 1]]`."""

    values_T: np.ndarray
    offsets_B1: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any] | np.ndarray], dtype: Any) -> Ragged:
        """Build from one sequence per row."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if len(rows) else np.empty(0, dtype)
        return cls(values, offsets_of(lengths))

    @property
    def lengths_B(self) -> np.ndarray:
        """Entries per row."""
        return np.diff(self.offsets_B1)

    def __len__(self) -> int:
        return len(self.offsets_B1) - 1

    def row(self, index: int) -> np.ndarray:
        """The entries of one row."""
        return self.values_T[self.offsets_B1[index] : self.offsets_B1[index + 1]]

    def take(self, rows_B: np.ndarray) -> Ragged:
        """Return the given rows in the given order."""
        offsets = offsets_of(self.lengths_B[rows_B])
        index_T = np.repeat(self.offsets_B1[rows_B] - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
        return Ragged(self.values_T[index_T], offsets)


def offsets_of(lengths_B: np.ndarray) -> np.ndarray:
    """Return offsets (B+1) of rows with the given lengths."""
    return np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)])


@dataclass(frozen=True)
class ExperienceRef:
    """What tasks hand to each other: where the experience is and how much of it there is."""

    path: str
    samples: int
    prompt_tokens: int
    response_tokens: int
    policy_version: int
    prompts: int = 0  # drawn from the data for it, also those that were replaced


def _to_arrow(column: Any) -> pa.Array:
    if isinstance(column, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(column.offsets_B1, pa.int64()), pa.array(column.values_T))
    return pa.array(column)


def write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Write a new experience file atomically; values are `Ragged`, arrays or lists with one entry per row."""
    _write_table(path, pa.table({name: _to_arrow(column) for name, column in columns.items()}))


def add_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Add (or replace) columns by writing the whole file anew and renaming it into place."""
    table = pq.read_table(path, memory_map=True)
    for name, column in columns.items():
        array = _to_arrow(column)
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, array)
        else:
            table = table.append_column(name, array)
    _write_table(path, table)


def _write_table(path: Path, table: pa.Table) -> None:
    with replacing(path) as aside:
        # Dictionary encoding costs more time than the space it saves on token ids and floats.
        pq.write_table(table, aside, compression="lz4", use_dictionary=False, write_statistics=False)


def read_columns(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Read columns: list columns as `Ragged`, numbers as numpy arrays, text as lists.

    Raises:
        KeyError: a column is absent (its task has not run).
    """
    present = column_names(path)
    if missing := [name for name in names if name not in present]:
        raise KeyError(f"{path} has no column {', '.join(missing)}: the task that writes it has not run")
    table = pq.read_table(path, columns=list(names), memory_map=True)
    return {name: _from_arrow(table.column(name)) for name in names}


def column_names(path: str | Path) -> list[str]:
    """Return the columns present in an experience file."""
    return list(pq.read_schema(path).names)


def _from_arrow(column: pa.ChunkedArray) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        offsets = np.asarray(array.offsets, dtype=np.int64)
        values = array.values.to_numpy(zero_copy_only=False)
        return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])
    if pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
        return array.to_numpy(zero_copy_only=False)
    return array.to_pylist()
