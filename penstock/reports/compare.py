"""Runs of an MLflow experiment side by side: what came out, what differed, and how they got there.

Left out: statistics over seeds, filters and charts of any metric (MLflow's own comparison has them).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.base.names import nearest_name
from penstock.reports.evaluation import how_sampled, shown, with_interval
from penstock.reports.plots import COLOURS, canvas, line, save
from penstock.trackers.mlflow import connect, default_tracking_uri

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from rich.console import RenderableType
    from rich.table import Table

CURVES = {"reward/mean": "Mean reward", "heldout/accuracy": "Held-out accuracy"}

# In a terminal every character counts.
_HEADINGS = {
    "iterations": "iter.",
    "reward/mean": "reward",
    "heldout/accuracy": "accuracy",
    "heldout/accuracy best": "best",
    "s/iteration": "s/iter.",
}
# They name a run and change nothing in it.
_LABELS = ("name", "folder")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, the oldest first.

    results: one row per run (index: its name, with the start of its id where names repeat): `status`, `iterations`,
        `reward/mean` (the last), `heldout/accuracy` (the last), `heldout/accuracy best`, `s/iteration`
        (the median), `tokens/s` (generated, over whole iterations, as in the summary). What a run did not log is NaN.
    evaluation: one row per figure of the last held-out evaluation, one column per run, as text with 95 % intervals.
    differences: one row per parameter whose value is not the same in all runs, one column per run.
    curves: long form with columns `run`, `metric`, `iteration`, `value`, for the metrics in CURVES.
    """

    results: pd.DataFrame
    evaluation: pd.DataFrame
    differences: pd.DataFrame
    curves: pd.DataFrame


def store_of(folder: Path) -> str:
    """Return the address of the store with the runs of a directory: the database in it, or that of the environment.

    Raises:
        UserError: there is no database.
    """
    uri = default_tracking_uri(folder)
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.is_file():  # MLflow would make an empty one
        raise UserError(f"there is no MLflow database {database}", "name the directory that holds the run folders")
    return uri


def compare_runs(tracking_uri: str, experiment: str, run_ids: Sequence[str] | None = None) -> Comparison:
    """Read the runs of `experiment` (all, or those in `run_ids`, given as ids or names).

    Raises:
        UserError: there is no such experiment, no run in it, or not one that was asked for.
    """
    import pandas as pd

    client = connect(tracking_uri)
    runs = _named(_runs(client, tracking_uri, experiment, run_ids))
    histories = {name: _Histories(client, run) for name, run in runs.items()}
    results = pd.DataFrame.from_dict(
        {name: _result(run, histories[name]) for name, run in runs.items()}, orient="index"
    ).rename_axis("name")
    params = pd.DataFrame({name: run.data.params for name, run in runs.items()}).sort_index().rename_axis("parameter")
    params = params.drop(index=[label for label in _LABELS if label in params.index])
    curves = [
        {"run": name, "metric": metric, "iteration": iteration, "value": value}
        for name, history in histories.items()
        for metric in CURVES
        for iteration, value in history(metric).items()
    ]
    return Comparison(
        results,
        _evaluation(runs),
        params[params.nunique(axis=1, dropna=False) > 1].fillna("–"),
        pd.DataFrame(curves, columns=["run", "metric", "iteration", "value"]),
    )


def recorded_figures(folder: Path, run_id: str) -> dict[tuple[int, str], float]:
    """Return all figures that MLflow holds of a run, by iteration and name; NaN and infinite ones are left out.

    Args:
        folder: directory of the run folders.
    """
    client = connect(store_of(folder))
    run = client.get_run(run_id)
    histories = {name: _Histories(client, run)(name) for name in run.data.metrics}
    return {(step, name): value for name, history in histories.items() for step, value in history.items()}


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write `compare.md`, `results.csv`, `differences.csv`, and `compare.png` where a curve exists."""
    folder.mkdir(parents=True, exist_ok=True)
    page, results, differences = (folder / name for name in ("compare.md", "results.csv", "differences.csv"))
    comparison.results.to_csv(results)
    comparison.differences.to_csv(differences)
    picture = save(comparison_figure, comparison.curves, folder / "compare.png")
    parts = [
        "# Comparison",
        _as_text(comparison.results).to_markdown(disable_numparse=True),
    ]
    if len(comparison.evaluation):
        parts += ["## Last held-out evaluation", comparison.evaluation.to_markdown(disable_numparse=True)]
    parts.append("## Parameters that differ")
    parts.append(comparison.differences.to_markdown(disable_numparse=True) if len(comparison.differences) else "None.")
    if picture:
        parts.append(f"![curves]({picture.name})")
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [page, results, differences, *([picture] if picture else [])]


def comparison_figure(curves: pd.DataFrame) -> Figure | None:
    """Overlay the runs' curves, one panel per metric that any of them logged."""
    metrics = [metric for metric in CURVES if (curves["metric"] == metric).any()]
    if not metrics:
        return None
    axes = canvas(len(metrics), height=3.4)
    colours = {run: COLOURS[number % len(COLOURS)] for number, run in enumerate(curves["run"].unique())}
    for panel, metric in zip(axes, metrics, strict=True):
        panel.set_title(CURVES[metric])
        for run, rows in curves[curves["metric"] == metric].groupby("run", sort=False):
            line(panel, rows.set_index("iteration")["value"], colours[run], str(run))
    figure: Figure = axes[0].get_figure()  # type: ignore[assignment]
    pairs = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(len(handles), 3))
    return figure


def render(comparison: Comparison) -> RenderableType:
    """Return one row per run: its results, and under its name its own values of the parameters that differ.

    Below it are the held-out figures with their intervals, if there are any.
    """
    from rich.console import Group

    table = _results_table(comparison)
    return Group(table, _evaluation_table(comparison.evaluation)) if len(comparison.evaluation) else table


def _evaluation_table(evaluation: pd.DataFrame) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("last evaluation (95 % interval)", overflow="fold")
    for name in evaluation.columns:
        table.add_column(Text(str(name)), justify="right", overflow="fold")
    for label, values in evaluation.iterrows():
        table.add_row(Text(str(label)), *(Text(str(value)) for value in values))
    return table


def _results_table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = len(comparison.differences) > 0
    table = Table(box=box.SIMPLE_HEAD, show_lines=lines, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for column in comparison.results.columns:
        table.add_column(_HEADINGS.get(column, column), justify="left" if column == "status" else "right", no_wrap=True)
    for name, values in _as_text(comparison.results).iterrows():
        settings = [f"\n  {parameter} = {value}" for parameter, value in comparison.differences[name].items()]
        table.add_row(Text(str(name)) + Text("".join(settings), "dim"), *(Text(value) for value in values))
    return table


class _Histories:
    """A run's metrics by iteration, without values that are not finite; each is read from the store once."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self._client, self._run = client, run
        self._read: dict[str, dict[int, float]] = {}

    def __call__(self, metric: str) -> dict[int, float]:
        if metric not in self._read:
            history = self._client.get_metric_history(self._run.info.run_id, metric)
            self._read[metric] = {point.step: point.value for point in history if math.isfinite(point.value)}
        return self._read[metric]


def _runs(client: MlflowClient, tracking_uri: str, name: str, wanted: Sequence[str] | None) -> list[Run]:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        names = [found.name for found in client.search_experiments()]
        near = nearest_name(name, names)
        raise UserError(
            f"there is no MLflow experiment '{name}' in {public_address(tracking_uri)}",
            (f"did you mean '{near}'? " if near else "") + f"Existing: {', '.join(sorted(names))}",
        )
    runs: list[Run] = []
    token = None
    while page := client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"], page_token=token):
        runs += page
        if not (token := page.token):
            break
    if not runs:
        raise UserError(f"the MLflow experiment '{name}' has no runs", "train first, or name another experiment")
    if wanted is None:
        return runs
    known = {label: run for run in runs for label in (run.info.run_name, run.info.run_id)}
    if missing := [label for label in wanted if label not in known]:
        raise UserError(
            f"the MLflow experiment '{name}' has no run {', '.join(missing)}",
            f"its newest runs: {', '.join(str(run.info.run_name) for run in runs[-5:])}",
        )
    return [run for run in runs if {run.info.run_id, run.info.run_name} & set(wanted)]


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    names = Counter(run.info.run_name for run in runs)

    def label(run: Run) -> str:
        name = str(run.info.run_name)
        return name if names[name] == 1 else f"{name} ({run.info.run_id[:6]})"

    return {label(run): run for run in runs}


def _result(run: Run, history: _Histories) -> dict[str, Any]:
    from statistics import median

    def last(metric: str) -> float:
        return next(reversed(history(metric).values()), math.nan)

    def middle(metric: str) -> float:
        return median(history(metric).values()) if history(metric) else math.nan

    return {
        "status": run.info.status,
        "iterations": int(run.data.metrics.get("iteration", 0)),
        "reward/mean": last("reward/mean"),
        "heldout/accuracy": last("heldout/accuracy"),
        "heldout/accuracy best": max(history("heldout/accuracy").values(), default=math.nan),
        "s/iteration": middle("time/iteration_s"),
        "tokens/s": _tokens_per_second(history),
    }


def _tokens_per_second(history: _Histories) -> float:
    """Generated tokens over the time of the iterations that generated them, as `summary.json` has it."""
    steps = [step for step in history("rollout/tokens_per_s") if step > 0]
    seconds = sum(history("time/iteration_s").get(step, 0.0) for step in steps)
    return sum(history("rollout/tokens").get(step, 0.0) for step in steps) / seconds if seconds else math.nan


def _evaluation(runs: Mapping[str, Run]) -> pd.DataFrame:
    """The figures of which at least one run has an interval: the others are compared by their curves in MLflow."""
    import pandas as pd

    last = {name: {k: v for k, v in run.data.metrics.items() if math.isfinite(v)} for name, run in runs.items()}
    every = {metric for metrics in last.values() for metric in metrics}
    sure = [metric for metric in sorted(every) if f"{metric}/low" in every]
    rows = {
        label: {name: with_interval(metrics, metric) for name, metrics in last.items()}
        for metric, label in shown(sure).items()
    }
    how = {name: how_sampled(metrics) or "–" for name, metrics in last.items()}
    rows = ({"responses": how} if rows and any(map(how_sampled, last.values())) else {}) | rows
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(runs)).rename_axis("figure")


def _as_text(results: pd.DataFrame) -> pd.DataFrame:
    def text(value: Any) -> str:
        if not isinstance(value, float):
            return f"{value:,}" if isinstance(value, int) else str(value)
        return "–" if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"

    return results.astype(object).map(text)
