"""Rows of different lengths as flat values and offsets: nothing is ever padded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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

    @classmethod
    def concatenated(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, one part after the other; at least one part."""
        values_T = np.concatenate([part.values_T for part in parts])
        return cls(values_T, offsets_of(np.concatenate([part.lengths_B for part in parts])))

    @property
    def lengths_B(self) -> np.ndarray:
        """Entries per row."""
        return np.diff(self.offsets_B1)

    @functools.cached_property
    def ids_B(self) -> np.ndarray:
        """A number per row, equal where rows are equal."""
        numbers: dict[bytes, int] = {}
        rows = (self.row(row).tobytes() for row in range(len(self)))
        return np.fromiter((numbers.setdefault(row, len(numbers)) for row in rows), np.int64, len(self))

    def __len__(self) -> int:
        return len(self.offsets_B1) - 1

    def row(self, index: int) -> np.ndarray:
        """The entries of one row."""
        return self.values_T[self.offsets_B1[index] : self.offsets_B1[index + 1]]

    def lengths_of(self, rows_B: np.ndarray) -> np.ndarray:
        """Entries of the given rows, without a look at the others."""
        lengths_B: np.ndarray = self.offsets_B1[rows_B + 1] - self.offsets_B1[rows_B]
        return lengths_B

    def take(self, rows_B: np.ndarray) -> Ragged:
        """Return the given rows in the given order."""
        offsets = offsets_of(self.lengths_of(rows_B))
        index_T = np.repeat(self.offsets_B1[rows_B] - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
        return Ragged(self.values_T[index_T], offsets)


def offsets_of(lengths_B: np.ndarray) -> np.ndarray:
    """Return offsets (B+1) of rows with the given lengths."""
    return np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)])
