"""Columns of experience in memory, `Ragged`, arrays or lists: put behind each other, and some of their rows taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from penstock.base.ragged import Ragged

Columns = dict[str, Any]


def joined(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Columns:
    """Return the rows of all parts, one part after the other; a column of numbers or texts is empty where one lacks it.

    Args:
        parts: with a column `group` each, which says how many rows there are.
        names: of the columns that are wanted; at least one part has each.
    """
    return {name: _joined(parts, name) for name in names}


def taken(columns: Mapping[str, Any], rows_B: np.ndarray) -> Columns:
    """Return some rows of all columns."""
    return {name: _taken(column, rows_B) for name, column in columns.items()}


def groups_taken(columns: Mapping[str, Any], groups_G: np.ndarray, samples: int) -> Columns:
    """Return the rows of some groups, of `samples` neighbours each, with numbers from 0 on."""
    rows_B = (groups_G[:, None] * samples + np.arange(samples)).ravel()
    return taken(columns, rows_B) | {"group": np.repeat(np.arange(len(groups_G)), samples)}


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> Any:
    there = next(part[name] for part in parts if name in part)
    columns = [part[name] if name in part else _empty(there, len(part["group"])) for part in parts]
    if isinstance(there, Ragged):
        return Ragged.concatenated(columns)
    return np.concatenate(columns) if isinstance(there, np.ndarray) else list(chain.from_iterable(columns))


def _empty(there: Any, rows: int) -> Any:
    return [None] * rows if isinstance(there, list) else np.full(rows, np.nan)


def _taken(column: Any, rows_B: np.ndarray) -> Any:
    if isinstance(column, Ragged):
        return column.take(rows_B)
    return column[rows_B] if isinstance(column, np.ndarray) else [column[row] for row in rows_B]
