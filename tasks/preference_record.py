"""The MLflow run of a training on preferences, and its summary at the end.

Figures are recorded step by step as those of iterations are (tasks/record.py). Left out: reports with pictures
(reports/report.py is about iterations).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from configs.preference import PairConfig
from reports import mlflow_run
from state.manifest import Progress, read_manifest
from state.run_folder import RunFolder, read_metrics
from tasks.checkpoint import begin_manifest
from tasks.interrupts import interrupts_deferred
from tasks.preference import loss_arguments
from tasks.record import close, ending, reopened, replay
from tasks.session import Training


@contextmanager
def recording_preferences(training: Training, config: PairConfig) -> Iterator[None]:
    """Keep the MLflow run open, of an earlier attempt if there is one; on the way out write the summary, always."""
    session, run = training.session(), training.run
    session.tracking_uri = mlflow_run.default_tracking_uri(run.path.parent)
    with interrupts_deferred():
        _open_mlflow(training, config)
    if not run.manifest.is_file():
        begin_manifest(training, Progress())  # from here on the run can be resumed
    with ending(partial(_finish, training)):
        yield


def _open_mlflow(training: Training, config: PairConfig) -> None:
    if reopened(training):
        return
    session, run = training.session(), training.run
    params = mlflow_run.flatten(config.model_dump(mode="json"))
    tags = {"penstock.run": str(run.path), "algorithm": loss_arguments(config)["name"]}
    session.mlflow_run_id = mlflow_run.open_run(session.tracking_uri, config.experiment, run.name, tags, params)
    mlflow_run.log_artifacts(session.tracking_uri, session.mlflow_run_id, run.config)
    if run.manifest.is_file():
        replay(training, done_steps(run, config))


def done_steps(run: RunFolder, config: PairConfig) -> int:
    """Return the step from which a resume of `run` goes on."""
    if run.model("final").exists():
        return config.trainer.steps
    return read_manifest(run.finetuning).progress.iteration if run.finetuning.manifest.is_file() else 0


def _finish(training: Training, status: str, mlflow_status: mlflow_run.RunStatus) -> None:
    close(training, _summary(training, status), mlflow_status)


def _summary(training: Training, status: str) -> dict[str, Any]:
    session, records = training.session(), read_metrics(training.run)
    steps = [item["metrics"] for item in records if item["iteration"] > 0]
    heldout = [item["metrics"] for item in records if "heldout/accuracy" in item["metrics"]]
    first = records and records[0]["iteration"] == 0
    return {
        "status": status,
        "seconds": round(time.monotonic() - session.started, 3),
        "steps": len(steps),
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "accuracy_last": steps[-1]["accuracy"] if steps else None,
        "heldout_accuracy_before": heldout[0]["heldout/accuracy"] if heldout and first else None,
        "heldout_accuracy": heldout[-1]["heldout/accuracy"] if len(heldout) > 1 else None,
        "attention": session.engine_figures.get("attention"),
        "recomputed": str(session.recomputed["sft"]) if "sft" in session.recomputed else None,
        "mlflow_run_id": session.mlflow_run_id,
    }
