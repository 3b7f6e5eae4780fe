"""The report of a sweep: its runs compared over seeds, from their folders, and which settings did best.

Each group is compared with the best one, so that the report says which others are as good as chance can tell.

Left out: how a comparison looks (penstock/reports/comparing/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from penstock.base.errors import UserError
from penstock.reports.comparing.folders import folder_runs
from penstock.reports.comparing.groups import Group, grouped
from penstock.reports.comparing.pages import write_comparison
from penstock.reports.comparing.tables import Comparison, comparison_of, number
from penstock.state.sweep import Sweep, SweepFolder

LOWEST = "lowest"


@dataclass(frozen=True)
class Best:
    """The group whose mean of a figure is best.

    Attributes:
        value: mean over its completed runs of the last value of the figure.
        runs: how many these are.
    """

    group: Group
    figure: str
    value: float
    runs: int


def figure_of(by: str) -> tuple[str, float]:
    """Return the figure by which the best is told, and the sign that makes more of it better.

    Raises:
        UserError: it is neither `FIGURE` nor `lowest FIGURE`.
    """
    words = by.split()
    if len(words) == 2 and words[0] == LOWEST:
        return words[1], -1.0
    if len(words) == 1 and words[0] != LOWEST:
        return words[0], 1.0
    raise UserError(f"--by '{by}' is no figure", f"name one, e.g. heldout/accuracy or '{LOWEST} heldout/kl'")


def best_of(groups: Sequence[Group], by: str) -> Best | None:
    """Return the best group; None: no completed run has the figure."""
    figure, sign = figure_of(by)
    found = []
    for group in groups:
        if values := [run.last[figure] for run in group.completed if figure in run.last]:
            found.append(Best(group, figure, mean(values), len(values)))
    return max(found, key=lambda best: sign * best.value, default=None)


def compared(folder: SweepFolder, sweep: Sweep) -> tuple[Comparison, Best | None] | None:
    """Return the trainings that have begun, compared with the best group; None: none has begun."""
    begun = [folder.run(training).path for training in sweep.trainings if folder.run(training).config.is_file()]
    if not begun:
        return None
    runs = folder_runs(begun)
    best = best_of(grouped(runs), sweep.by)
    return comparison_of(runs, None if best is None else best.group.runs[0].name), best


def write_sweep_report(folder: SweepFolder, sweep: Sweep) -> bool:
    """Write the report of the trainings that have begun into the sweep's folder; return whether any has."""
    if (found := compared(folder, sweep)) is None:
        return False
    write_comparison(found[0], folder.report, folder.path.name, headline(sweep, *found))
    return True


def headline(sweep: Sweep, comparison: Comparison, best: Best | None) -> str:
    """Return what came out in two sentences."""
    done = sum(run.completed for run in comparison.runs)
    said = f"{done} of {len(sweep.trainings)} trainings of {sweep.recipe} came to their end."
    return f"{said} {best_text(sweep.by, best)}"


def best_text(by: str, best: Best | None) -> str:
    """Return which group is best, for people."""
    if best is None:
        return f"None of them recorded {figure_of(by)[0]}, by which the best was to be told."
    over = "1 run" if best.runs == 1 else f"{best.runs} runs"
    value = "–" if math.isnan(best.value) else number(best.value)
    return f"Best by {by}: {best.group.title}, with {value} on the mean of {over}."


def last_value(run: Path, by: str) -> str:
    """Return the last value of the figure in a run's folder as `heldout/accuracy 0.843`; empty if it has none."""
    figure, _ = figure_of(by)
    last = folder_runs([run])[0].last
    return f"{figure} {number(last[figure])}" if figure in last else ""
