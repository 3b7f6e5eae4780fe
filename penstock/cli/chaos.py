"""What `penstock chaos` shows and keeps: a row per kill, and whether every run ended as the one left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import median

from rich.table import Table

from penstock.benchmarks.reporting.result import new_result
from penstock.chaos.kills import Kill, Outcome
from penstock.cli.results import command, write_measured
from penstock.cli.terminal import console


def is_well(outcome: Outcome) -> bool:
    """Whether every run was equal and nothing outlived one."""
    return not any(outcome.differences.values()) and not outcome.orphans


def tell_time(text: str) -> None:
    """Print what happens, and when."""
    console.print(f"{datetime.now():%H:%M:%S} {text}", highlight=False, markup=False, soft_wrap=True)


def show(outcome: Outcome) -> None:
    """Print what was killed, how long two further iterations took, and what is not as it should be."""
    console.print(table(outcome))
    for run, found in outcome.differences.items():
        for difference in found:
            console.print(f"{run}: {difference}", highlight=False, markup=False, soft_wrap=True)
    for orphan in outcome.orphans:
        console.print(f"left over: {orphan}", highlight=False, markup=False, soft_wrap=True)
    equal = equal_kills(outcome)
    console.print(f"{equal} of {len(outcome.kills)} kills left no trace, {len(outcome.orphans)} processes left over")


def table(outcome: Outcome) -> Table:
    """Return a row per kill."""
    shown = Table("run", "killed", "after iteration", "noticed after, s", "two iterations took, s", "equal")
    for kill in outcome.kills:
        noticed = "–" if kill.noticed_s is None else f"{kill.noticed_s:.1f}"
        equal = "no" if outcome.differences[kill.run] else "yes"
        shown.add_row(kill.run, kill.kind, str(kill.iteration), noticed, f"{kill.two_iterations_s:.1f}", equal)
    return shown


def equal_kills(outcome: Outcome) -> int:
    """Return how many kills fell in runs that ended as the one left alone."""
    return sum(not outcome.differences[kill.run] for kill in outcome.kills)


def write(path: Path, outcome: Outcome) -> None:
    """Write the result of a benchmark: counts, medians by kind, and a row per kill.

    Raises:
        UserError: the disk does not take it.
    """
    figures = {
        "kills": len(outcome.kills),
        "equal": equal_kills(outcome),
        "orphans": len(outcome.orphans),
        "two_iterations_s": median(kill.two_iterations_s for kill in outcome.kills),
        "two_iterations_s_max": max(kill.two_iterations_s for kill in outcome.kills),
        **_by_kind(outcome.kills),
    }
    details = [asdict(kill) for kill in outcome.kills]
    write_measured(path, new_result("chaos", command(), figures, details=details))


def _by_kind(kills: Sequence[Kill]) -> dict[str, float]:
    """Return the median seconds until two further iterations, by what was killed."""
    kinds = sorted({kill.kind for kill in kills})
    return {f"two_iterations_s, {kind}": median(k.two_iterations_s for k in kills if k.kind == kind) for kind in kinds}
