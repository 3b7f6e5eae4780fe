"""Results as terminal tables: ours beside the peers, a scaling, a comparison of two builds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from penstock.benchmarks.reporting.compare import Change, direction
from penstock.benchmarks.reporting.result import BenchResult

COLOURS = {"better": "green", "worse": "bold red", "same": "dim", "not judged": "dim"}


def result_table(result: BenchResult) -> Table:
    """Return our figures beside each peer's; a gain of 2 means half the time or memory, or twice the rate."""
    table = Table(title=f"{result.bench} on {result.machine}", title_justify="left")
    table.add_column("figure")
    table.add_column("Penstock" if result.peers else "value", justify="right")
    for peer in result.peers:
        table.add_column(peer, justify="right")
        table.add_column("gain", justify="right")
    names = [*result.figures, *(n for figures in result.peers.values() for n in figures)]
    for name in dict.fromkeys(names):
        ours = result.figures.get(name)
        cells = ["" if ours is None else shown(name, ours)]
        for figures in result.peers.values():
            theirs = figures.get(name)
            cells += ["" if theirs is None else shown(name, theirs), _gain(name, ours, theirs)]
        table.add_row(name, *cells)
    return table


def _gain(name: str, ours: float | None, theirs: float | None) -> str:
    if not ours or not theirs or not direction(name):
        return ""
    return f"{ours / theirs if direction(name) > 0 else theirs / ours:.2f} x"


def details_table(result: BenchResult, columns: Sequence[str]) -> Table:
    """Return the rows of `details` with the given columns."""
    table = Table(title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in result.details:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    return table


def _cell(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) and not direction(name) else shown(name, value)


def comparison_table(old: BenchResult, new: BenchResult, changes: Sequence[Change]) -> Table:
    """Return what changed between two results."""
    table = Table(title=f"{new.bench}: {_commit(old)} to {_commit(new)}", title_justify="left")
    for name in ("figure", "old", "new", "change", ""):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for change in changes:
        percent = "" if change.ratio is None else f"{change.ratio - 1:+.1%}"
        after = "gone" if change.new is None else shown(change.name, change.new)
        cells = [shown(change.name, change.old), after, percent]
        table.add_row(change.name, *cells, Text(change.verdict, COLOURS[change.verdict]))
    return table


def _commit(result: BenchResult) -> str:
    return (result.commit or "no commit")[:9]


def shown(name: str, value: float) -> str:
    """Return a figure with its unit, which its name tells."""
    if name.startswith(("accuracy", "deviation_")):
        return f"{value:.1%}"
    if "gb_per_s" in name:
        return f"{value:,.1f} GB/s"
    if name.startswith("samples_per_s"):
        return f"{value:,.2f} /s"
    if "_per_s" in name:
        return f"{value:,.0f} tok/s"
    if name.endswith(("_s", "seconds")):
        return f"{value * 1000:.2f} ms" if abs(value) < 0.1 else f"{value:.2f} s"
    if name.endswith("_gib"):
        return f"{value:.1f} GiB"
    if "_mhz" in name:
        return f"{value:,.0f} MHz"
    if name.endswith("bytes"):
        return f"{value / (1 << 20):,.1f} MiB" if value else "0 B"
    if name.endswith(("mfu", "share", "balance")) or "efficiency" in name:
        return f"{value:.1%}"
    return f"{value:,.6g}"
