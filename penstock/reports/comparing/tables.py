"""A comparison as tables: of runs, of groups, of what differs.

Left out: where runs come from (recorded.py, folders.py), and what the tables look like (terminal.py, pages.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.base.errors import UserError
from penstock.reports.comparing.groups import LABELS, MEASURES, TOTALS, Contrast, Group, Mean, contrasts, grouped, pair
from penstock.reports.comparing.runs import CURVES, ComparedRun
from penstock.reports.comparing.samples import SamplePair, paired_samples
from penstock.reports.evaluation import how_sampled, shown, with_interval
from penstock.trackers.tracker import ITERATION

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were given.

    Attributes:
        runs: those compared.
        results: one row per run (index: its name): `status`, `iterations`, and `ComparedRun.outcome`.
        evaluation: one row per figure of the last held-out evaluation, one column per run, as text with 95 % intervals.
        differences: one row per parameter whose value is not the same in all runs, one column per run.
        curves: long form with columns `run`, `group`, `metric`, `iteration`, `value`, for the metrics in CURVES.
        groups: the runs by what they have in common but for the seed.
        contrasts: how groups differ from one of them.
        samples: responses of two of the runs to the same prompts, None where there are none.
    """

    runs: tuple[ComparedRun, ...]
    results: pd.DataFrame
    evaluation: pd.DataFrame
    differences: pd.DataFrame
    curves: pd.DataFrame
    groups: tuple[Group, ...]
    contrasts: tuple[Contrast, ...]
    samples: SamplePair | None

    @property
    def over_seeds(self) -> bool:
        """Whether there is a group of several runs: without one the groups say no more than the runs."""
        return any(len(group.runs) > 1 for group in self.groups)


def comparison_of(runs: Sequence[ComparedRun], against: str | None = None) -> Comparison:
    """Compare runs.

    Args:
        against: name or id of a run whose group the others are compared with; None: the first one's.

    Raises:
        UserError: that is none of the runs.
    """
    import pandas as pd

    groups = grouped(runs)
    base = groups[0] if against is None else _group_with(groups, against)
    group_of = {run.name: group.label for group in groups for run in group.runs}
    rows = {
        run.name: {"status": run.status, "iterations": int(run.last.get(ITERATION, 0)), **run.outcome} for run in runs
    }
    params = pd.DataFrame({run.name: dict(run.settings) for run in runs}).sort_index().rename_axis("parameter")
    params = params.drop(index=[label for label in LABELS if label in params.index])
    curves = [
        {"run": run.name, "group": group_of[run.name], "metric": metric, "iteration": iteration, "value": value}
        for run in runs
        for metric in CURVES
        for iteration, value in run.histories.get(metric, {}).items()
    ]
    two = pair(groups)
    return Comparison(
        tuple(runs),
        pd.DataFrame.from_dict(rows, orient="index").rename_axis("name"),
        _evaluation(runs),
        params[params.nunique(axis=1, dropna=False) > 1].astype(object).fillna("–"),
        pd.DataFrame(curves, columns=["run", "group", "metric", "iteration", "value"]),
        tuple(groups),
        tuple(contrasts(groups, base)),
        None if two is None else paired_samples(*two),
    )


def _group_with(groups: Sequence[Group], name: str) -> Group:
    for group in groups:
        if any(name in (run.name, run.tracked) for run in group.runs):
            return group
    names = ", ".join(run.name for group in groups for run in group.runs)
    raise UserError(f"'{name}' is not among the runs compared", f"name one of {names}")


def check_samples(comparison: Comparison) -> SamplePair:
    """Return the samples of two runs.

    Raises:
        UserError: there are none to show.
    """
    if comparison.samples is None:
        raise UserError(
            "there are no responses of two of these runs to the same prompts",
            "name two runs whose folders are on this machine, with held-out prompts or tables of samples in common",
        )
    return comparison.samples


# ---- groups --------------------------------------------------------------------------------------------------------


def group_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Return the A/B table as text: a row per group with its means and their 95 % intervals, and its totals."""
    import pandas as pd

    rows = {group.label: _group_row(group) for group in groups}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("group")


def _group_row(group: Group) -> dict[str, str]:
    settings = ", ".join(f"{name}={value}" for name, value in group.differing.items())
    runs = (
        str(len(group.runs))
        if len(group.completed) == len(group.runs)
        else f"{len(group.completed)} of {len(group.runs)}"
    )
    return {
        "settings": settings or "–",
        "runs": runs,
        **{title: mean_text(group.mean(measure)) for measure, title in MEASURES.items()},
        **{total: number(group.total(total), total) for total in TOTALS},
    }


def group_numbers(groups: Sequence[Group]) -> pd.DataFrame:
    """Return the same as numbers: of each measure its mean, the ends of the interval and how many runs have it."""
    import pandas as pd

    rows = {}
    for group in groups:
        row: dict[str, Any] = dict(group.differing) | {"runs": len(group.runs), "completed": len(group.completed)}
        for measure in MEASURES:
            mean = group.mean(measure) or Mean(math.nan, math.nan, math.nan, 0)
            row |= {measure: mean.value, f"{measure} low": mean.low, f"{measure} high": mean.high}
            row[f"{measure} runs"] = mean.runs
        rows[group.label] = row | {total: group.total(total) for total in TOTALS}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("group")


def contrast_table(found: Sequence[Contrast]) -> pd.DataFrame:
    """Return how groups differ as text: difference, its 95 % interval, p and the test."""
    import pandas as pd

    rows = [
        {
            "groups": f"{item.group} – {item.against}",
            "figure": MEASURES[item.measure],
            "difference": signed(item.difference.mean),
            "95 % interval": f"{signed(item.difference.low)} to {signed(item.difference.high)}",
            "p": p_text(item.difference.p),
            "beyond chance": "yes" if item.difference.significant else "no",
            "test": item.difference.test,
        }
        for item in found
    ]
    return pd.DataFrame(rows)


def contrast_numbers(found: Sequence[Contrast]) -> pd.DataFrame:
    """Return the same as numbers."""
    import pandas as pd

    rows = [
        {"group": item.group, "against": item.against, "measure": item.measure, **vars(item.difference)}
        for item in found
    ]
    names = ["group", "against", "measure", "mean", "low", "high", "p", "test"]
    return pd.DataFrame(rows, columns=names)


# ---- figures as text -----------------------------------------------------------------------------------------------


def results_text(results: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs as text."""
    return results.astype(object).apply(lambda column: column.map(lambda value: number(value, str(column.name))))


def number(value: Any, measure: str = "") -> str:
    """Return a figure as text; a dash for one that does not exist. Tokens are counted, so they have no fractions."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return (
        "–"
        if math.isnan(value)
        else f"{value:,.0f}"
        if abs(value) >= 1000 or measure.startswith("tokens ")
        else f"{value:.3f}"
    )


def mean_text(mean: Mean | None) -> str:
    """Return a mean with its interval: `0.842 (0.819 to 0.864)`."""
    if mean is None:
        return "–"
    return number(mean.value) + ("" if mean.runs == 1 else f" ({number(mean.low)} to {number(mean.high)})")


def signed(value: float) -> str:
    """Return a difference as text, with its sign."""
    return "–" if math.isnan(value) else f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3f}"


def p_text(p: float) -> str:
    """Return a p value as text."""
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _evaluation(runs: Sequence[ComparedRun]) -> pd.DataFrame:
    """The figures of which at least one run has an interval: the others are compared by their curves in MLflow."""
    import pandas as pd

    every = {metric for run in runs for metric in run.last}
    sure = [metric for metric in sorted(every) if f"{metric}/low" in every]
    rows = {label: {run.name: with_interval(run.last, metric) for run in runs} for metric, label in shown(sure).items()}
    how = {run.name: how_sampled(run.last) or "–" for run in runs}
    rows = ({"responses": how} if rows and any(how_sampled(run.last) for run in runs) else {}) | rows
    return pd.DataFrame.from_dict(rows, orient="index", columns=[run.name for run in runs]).rename_axis("figure")
