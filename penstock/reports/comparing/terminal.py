"""A comparison on the terminal: results, groups and how they differ, held-out figures, samples side by side.

In a terminal every character counts: headings are short there, and what all runs lack is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.reports.comparing.samples import SamplePair
from penstock.reports.comparing.tables import Comparison, contrast_table, group_table, results_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from rich.table import Table

_SIDE_BY_SIDE = 3  # in 120 characters, with an interval each
_HEADINGS = {
    "iterations": "iter.",
    "reward/mean": "reward",
    "heldout/accuracy": "accuracy",
    "heldout/accuracy best": "best",
    "s/iteration": "s/iter.",
    "tokens generated": "generated",
    "tokens trained": "trained",
}


def render(comparison: Comparison) -> RenderableType:
    """Return one row per run: its results, and under its name its own values of the parameters that differ.

    Below it are groups of several seeds, how groups differ, and held-out figures with intervals, if there are any.
    """
    from rich.console import Group

    parts = [_results_table(comparison)]
    if comparison.over_seeds:
        parts += _turned(group_table(comparison.groups), "mean over seeds (95 % interval)")
    if comparison.contrasts:
        parts.append(_plain(contrast_table(comparison.contrasts)))
    if len(comparison.evaluation):
        parts += _turned(comparison.evaluation.T, "last evaluation (95 % interval)")
    return Group(*parts)


def render_samples(samples: SamplePair, count: int) -> RenderableType:
    """Return the responses of two runs to the same prompts, `count` of those whose rewards differ most."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{samples.source}, rewards that differ most first", box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("prompt", overflow="fold", ratio=2)
    for name in samples.names:
        table.add_column(Text(name), overflow="fold", ratio=3)
        table.add_column("reward", justify="right")
    for prompt, one, two in samples.rows[:count]:
        answers = [cell for item in (one, two) for cell in (Text(item.response), f"{item.reward:.2f}")]
        table.add_row(Text(prompt), *answers)
    return table


def _results_table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_lines=len(comparison.differences) > 0, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    results = comparison.results.dropna(axis=1, how="all")
    for column in results.columns:
        table.add_column(_HEADINGS.get(column, column), justify="left" if column == "status" else "right", no_wrap=True)
    for name, values in results_text(results).iterrows():
        settings = [f"\n  {parameter} = {value}" for parameter, value in comparison.differences[name].items()]
        table.add_row(Text(str(name)) + Text("".join(settings), "dim"), *(Text(value) for value in values))
    return table


def _turned(rows: pd.DataFrame, title: str) -> list[Table]:
    """Show a table with its columns as rows, in several tables where more groups or runs are there than fit.

    What has no value at all has no place in them.
    """
    rows = rows[(rows != "–").any(axis=1)]
    return [_beside(rows.iloc[first : first + _SIDE_BY_SIDE], title) for first in range(0, len(rows), _SIDE_BY_SIDE)]


def _beside(rows: pd.DataFrame, title: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(title, overflow="fold")
    for name in rows.index:
        table.add_column(Text(str(name)), justify="right", overflow="fold")
    for label in rows.columns:
        if (rows[label] != "–").any():
            table.add_row(Text(str(label)), *(Text(str(value)) for value in rows[label]))
    return table


def _plain(rows: pd.DataFrame) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows.columns:
        right = name in ("difference", "95 % interval", "p")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for _, values in rows.iterrows():
        table.add_row(*(Text(str(value)) for value in values))
    return table
