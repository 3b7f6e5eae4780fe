"""The record of a supervised training on its own: figures of each step, its MLflow run, its summary.

As for preferences (tasks/preference_record.py). Left out: the warm-up inside `train`, whose record counts iterations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports import mlflow_run
from state.run_folder import read_metrics, truncate_metrics
from tasks.interrupts import interrupts_deferred
from tasks.record import append_record, close, ending, reopened, replay
from tasks.session import Training


@contextmanager
def recording_supervised(training: Training) -> Iterator[None]:
    """Keep the MLflow run open, of an earlier attempt if there is one; on the way out write the summary, always."""
    session, run = training.session(), training.run
    session.tracking_uri = mlflow_run.default_tracking_uri(run.path.parent)
    with interrupts_deferred():
        _open_mlflow(training)
    with ending(partial(_finish, training)):
        yield


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_steps(training: Training, first: int, losses: list[float]) -> None:
    """Write down the loss of every step from step `first` on; steps after it that are on record are forgotten."""
    truncate_metrics(training.run, first or -1)
    for step, loss in enumerate(losses, start=first + 1):
        append_record(training, step, {"loss": loss})


def _open_mlflow(training: Training) -> None:
    if reopened(training):
        return
    session, run, config = training.session(), training.run, training.config
    params = mlflow_run.flatten(config.model_dump(mode="json"))
    tags = {"penstock.run": str(run.path), "algorithm": "sft"}
    session.mlflow_run_id = mlflow_run.open_run(session.tracking_uri, config.record.experiment, run.name, tags, params)
    mlflow_run.log_artifacts(session.tracking_uri, session.mlflow_run_id, run.config)
    if run.manifest.is_file() and config.sft is not None:
        replay(training, config.sft.steps)


def _finish(training: Training, status: str, mlflow_status: mlflow_run.RunStatus) -> None:
    close(training, summary(training, status), mlflow_status)


def summary(training: Training, status: str) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, steps = training.session(), read_metrics(training.run)
    return {
        "status": status,
        "seconds": round(time.monotonic() - session.started, 3),
        "steps": len(steps),
        "loss_first": steps[0]["metrics"]["loss"] if steps else None,
        "loss_last": steps[-1]["metrics"]["loss"] if steps else None,
        "recomputed": str(session.recomputed["sft"]) if "sft" in session.recomputed else None,
        "mlflow_run_id": session.mlflow_run_id,
    }
