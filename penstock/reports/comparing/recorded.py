"""Runs as MLflow has them, wherever they were trained; and a comparison kept there.

This is the one file of the reports that knows MLflow. Left out: what is made of the runs (tables.py).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.base.names import nearest_name
from penstock.reports.comparing.runs import READ, ComparedRun
from penstock.trackers.mlflow import CHANGED, COMPARISONS, MlflowTracker, connect, default_tracking_uri
from penstock.trackers.tracker import Artifact, NewRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_NOTE = "mlflow.note.content"  # MLflow shows it as Markdown on a run's page
_NOTE_CHARACTERS = 5000  # that every store takes in a tag
_PART = "mlflow.parentRunId"


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


def recorded_runs(tracking_uri: str, experiment: str, wanted: Sequence[str] | None = None) -> list[ComparedRun]:
    """Return the runs of `experiment` (all, or those in `wanted`, given as ids or names), the oldest first.

    The run that stands for a sweep has no figures of its own: asked for, it means the trainings of the sweep.

    Raises:
        UserError: there is no such experiment, no run in it, or not one that was asked for.
    """
    client = connect(tracking_uri)
    return [_run(client, run, name) for name, run in _named(_runs(client, tracking_uri, experiment, wanted)).items()]


def recorded_figures(folder: Path, run_id: str) -> dict[tuple[int, str], float]:
    """Return all figures that MLflow holds of a run, by iteration and name; NaN and infinite ones are left out.

    Args:
        folder: directory of the run folders.
    """
    client = connect(store_of(folder))
    run = client.get_run(run_id)
    histories = {name: _history(client, run, name) for name in run.data.metrics}
    return {(step, name): value for name, history in histories.items() for step, value in history.items()}


def keep(tracking_uri: str, folder: Path, runs: Sequence[ComparedRun]) -> str:
    """Keep the files of a comparison as a run of the experiment `comparisons`; return its id.

    Its note is the Markdown page, as far as that fits, and its tag `penstock.compared` has the ids of the runs.
    """
    tracker, page = MlflowTracker(tracking_uri), (folder / "compare.md").read_text(encoding="utf-8")
    compared = ",".join(run.tracked for run in runs)[:_NOTE_CHARACTERS]
    tags = {"penstock.compared": compared, "penstock.folder": str(folder)}
    if len(page) <= _NOTE_CHARACTERS:
        tags[_NOTE] = page
    run_id = tracker.open(NewRun(folder.name, COMPARISONS, tags))
    tracker.artifact(Artifact("comparison", folder))
    tracker.close("completed", time.time())
    return run_id


def _run(client: MlflowClient, run: Run, name: str) -> ComparedRun:
    tags = run.data.tags
    changed = {"changed at a resume": tags[CHANGED]} if tags.get(CHANGED) else {}
    return ComparedRun(
        name=name,
        status=run.info.status,
        completed=run.info.status == "FINISHED",
        settings=run.data.params | changed,
        histories={metric: _history(client, run, metric) for metric in READ if metric in run.data.metrics},
        last={metric: value for metric, value in run.data.metrics.items() if math.isfinite(value)},
        summary=_summary(client, run),
        folder=Path(tags["penstock.run"]) if "penstock.run" in tags else None,
        tracked=str(run.info.run_id),
    )


def _history(client: MlflowClient, run: Run, metric: str) -> dict[int, float]:
    points = client.get_metric_history(run.info.run_id, metric)
    return {
        point.step: point.value for point in sorted(points, key=lambda point: point.step) if math.isfinite(point.value)
    }


def _summary(client: MlflowClient, run: Run) -> Mapping[str, Any]:
    """Return what the run's summary says; nothing of a run that has not ended, or whose artifacts are out of reach."""
    import tempfile

    run_id = run.info.run_id
    if "summary.json" not in {item.path for item in client.list_artifacts(run_id)}:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        path = client.download_artifacts(run_id, "summary.json", scratch)
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


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
    sweeps = {run.data.tags.get(_PART) for run in runs}
    trained = [run for run in runs if run.info.run_id not in sweeps]
    if wanted is None:
        return trained
    known = {label: run for run in runs for label in (run.info.run_name, run.info.run_id)}
    if missing := [label for label in wanted if label not in known]:
        raise UserError(
            f"the MLflow experiment '{name}' has no run {', '.join(missing)}",
            f"its newest runs: {', '.join(str(run.info.run_name) for run in runs[-5:])}",
        )
    meant = {known[label].info.run_id for label in wanted} | set(wanted)
    return [run for run in trained if meant & {run.info.run_id, run.info.run_name, run.data.tags.get(_PART)}]


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    names = Counter(run.info.run_name for run in runs)

    def label(run: Run) -> str:
        name = str(run.info.run_name)
        return name if names[name] == 1 else f"{name} ({run.info.run_id[:6]})"

    return {label(run): run for run in runs}
