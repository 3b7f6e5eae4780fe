"""What a replayed task gave against what was stored of it: columns of the experience, and recorded figures.

Equal means the same bits, or within a tolerance where one is given: on GPUs sums are not taken in a fixed order. Left
out are figures of the machine (penstock/state/measured.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from penstock.base.ragged import Ragged
from penstock.state.experience import RESAMPLED
from penstock.state.measured import is_measured

Columns = Mapping[str, Any]

NOTHING = "-"


@dataclass(frozen=True)
class Compared:
    """A row of the table: what was compared, both sides in short, how they differ; `equal` decides the exit code."""

    task: str
    what: str
    stored: str
    replayed: str
    difference: str
    equal: bool


@dataclass(frozen=True)
class Replayed:
    """What a replay found, and where what it made again lies; None: it is gone, since all was equal."""

    rows: tuple[Compared, ...]
    folder: Path | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return all(row.equal for row in self.rows)


def compared_columns(task: str, stored: Columns, replayed: Columns, tolerance: float = 0.0) -> list[Compared]:
    """Compare columns of the same rows; one that only one side has is a difference.

    Args:
        tolerance: largest difference that counts as none, as a share of the column's largest value.
    """
    rows = []
    for name in dict.fromkeys([*stored, *replayed]):
        before, after = (_in_short(columns[name]) if name in columns else NOTHING for columns in (stored, replayed))
        difference = "only one has it"
        if name in stored and name in replayed:
            difference = _difference(stored[name], replayed[name], tolerance)
        rows.append(Compared(task, name, before, after, difference or "none", equal=not difference))
    return rows


def compared_figures(
    task: str, stored: Mapping[str, float], replayed: Mapping[str, float], tolerance: float = 0.0
) -> list[Compared]:
    """Compare the figures that a task gave with those that the run recorded.

    Args:
        stored: all figures of the iteration; those of other tasks are passed over. Empty: none were recorded, so the
            replayed ones are shown, and differ from nothing.
        tolerance: largest difference that counts as none, as a share of the stored figure.
    """
    rows = []
    for name, value in replayed.items():
        if is_measured(name) or not np.isfinite(value):
            continue
        now = f"{value:.9g}"
        if name not in stored:
            rows.append(Compared(task, name, NOTHING, now, "not recorded", equal=not stored))
            continue
        apart = abs(value - stored[name])
        equal = apart <= tolerance * abs(stored[name])
        rows.append(Compared(task, name, f"{stored[name]:.9g}", now, "none" if equal else f"{apart:.3g}", equal))
    return rows


def same_rows(stored: Columns, replayed: Columns) -> tuple[Columns, Columns]:
    """Return the rows that a rollout gave and the stored batch still has, both in the order of the batch.

    Dynamic sampling lets other rollouts' groups take the place of some; the numbers of groups are drawn anew then.
    """
    if RESAMPLED not in stored:
        return stored, replayed
    kept_B = np.flatnonzero(stored[RESAMPLED] == 0)
    place = {name: row for row, name in enumerate(replayed["sample_id"])}
    rows_B = np.asarray([place[stored["sample_id"][row]] for row in kept_B], np.int64)
    names = [name for name in replayed if name != "group"]
    return {name: _taken(stored[name], kept_B) for name in names}, {
        name: _taken(replayed[name], rows_B) for name in names
    }


def table_of(rows: Sequence[Compared]) -> Table:
    """Return the table for a terminal, with a heading for each task."""
    table = Table("what", "stored", "replayed", "difference")
    task = ""
    for row in rows:
        if row.task != task:
            task = row.task
            table.add_section()
            table.add_row(f"[bold]{task}[/]")
        marked = row.difference if row.equal else f"[bold red]{row.difference}[/]"
        table.add_row(f"  {row.what}", row.stored, row.replayed, marked)
    return table


def _difference(stored: Any, replayed: Any, tolerance: float) -> str:
    """Say how two columns differ; empty if they do not."""
    if isinstance(stored, Ragged):
        if not np.array_equal(stored.offsets_B1, replayed.offsets_B1):
            if len(stored) != len(replayed):
                return f"{len(stored)} and {len(replayed)} rows"
            return f"{int((stored.lengths_B != replayed.lengths_B).sum())} of {len(stored)} rows have other lengths"
        stored, replayed = stored.values_T, replayed.values_T
    if len(stored) != len(replayed):
        return f"{len(stored)} and {len(replayed)} rows"
    if not isinstance(stored, np.ndarray) or not isinstance(replayed, np.ndarray):
        other = sum(before != after for before, after in zip(stored, replayed, strict=True))
        return f"{other} of {len(stored)} rows" if other else ""
    return _of_numbers(stored, replayed, tolerance)


def _of_numbers(stored: np.ndarray, replayed: np.ndarray, tolerance: float) -> str:
    before, after = stored.astype(np.float64), replayed.astype(np.float64)
    differ = ~((before == after) | (np.isnan(before) & np.isnan(after)))
    if not differ.any():
        return ""
    apart = np.abs(after[differ] - before[differ])
    most = float(np.nanmax(apart)) if not np.isnan(apart).all() else float("nan")
    largest = float(np.max(np.abs(before[np.isfinite(before)]), initial=0.0))
    if most <= tolerance * largest and np.isfinite(apart).all():
        return ""
    return f"{int(differ.sum())} of {differ.size}, at most {most:.3g}"


def _in_short(column: Any) -> str:
    values = column.values_T if isinstance(column, Ragged) else column
    if not isinstance(values, np.ndarray):
        return f"{len(values)} rows"
    finite = values[np.isfinite(values)]
    mean = f"mean {finite.astype(np.float64).mean():.9g}" if finite.size else "none finite"
    return f"{values.size} numbers, {mean}"


def _taken(column: Any, rows_B: np.ndarray) -> Any:
    if isinstance(column, Ragged):
        return column.take(rows_B)
    return column[rows_B] if isinstance(column, np.ndarray) else [column[row] for row in rows_B]
