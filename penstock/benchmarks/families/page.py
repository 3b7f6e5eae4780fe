"""The table of docs/models.md, between two marks: which families are trained and served, and how closely all agree.

It is made of a result of `penstock bench families`; a test renders the page and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.algorithms.catalogue import table
from penstock.base.errors import UserError
from penstock.benchmarks.families.measuring import FIGURES
from penstock.benchmarks.reporting.result import BenchResult

BEGIN, END = "<!-- families: written by 'penstock bench families --page' -->\n", "<!-- end of families -->"
HEAD = ("family", "`model_type`", "rollout", "reshard", *(name.replace("_", " on ") for name in FIGURES))


def read_page(path: Path) -> str:
    """Return the text of a page that has a place for the table.

    Raises:
        UserError: there is none.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text:
        raise UserError(f"{path} is no page with a place for the table", "name docs/models.md or a copy")
    return text


def rendered(page: str, result: BenchResult) -> str:
    """Return the page with the table of a result."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    taken = [row for row in result.details if "refused" not in row]
    refused = [row for row in result.details if "refused" in row]
    lines = [*table(HEAD, [_taken(row) for row in taken])]
    lines += ["", *table(("refused", "`model_type`", "why"), [_refused(row) for row in refused])] if refused else []
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _taken(row: Mapping[str, Any]) -> tuple[str, ...]:
    figures = (_figure(row.get(name)) for name in FIGURES)
    return row["family"], f"`{row['model_type']}`", row["served_by"], row["strategy"], *figures


def _figure(value: float | None) -> str:
    """Return a figure as the table has it; of a model that has no such thing a dash."""
    if value is None:
        return "–"
    return f"{value:.0e}" if value < 0.01 else f"{value:.1f}"


def _refused(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["family"], f"`{row['model_type']}`", row["refused"]
