"""The record of a supervised training on its own: figures of each step, its MLflow run, its summary.

As for preferences (tasks/preference_record.py). Left out: the warm-up inside `train` (tasks/record_warm_up.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from state.run_folder import read_metrics
from tasks.finetuning import steps_done
from tasks.record import append_record, elapsed, open_record
from tasks.session import Training


@contextmanager
def recording_supervised(training: Training) -> Iterator[None]:
    """Keep the record open, of an earlier attempt if there is one; on the way out write the summary, always."""
    config = training.config
    assert config.sft is not None
    done = steps_done(training.run, "sft", config.sft.steps)
    with open_record(training, "sft", config, config.record.experiment, "sft", done, summary):
        yield


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_steps(training: Training, first: int, losses: list[float]) -> None:
    """Write down the loss of every step from step `first` on."""
    for step, loss in enumerate(losses, start=first + 1):
        append_record(training, step, {"loss": loss})


def summary(training: Training, status: str) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, steps = training.session(), read_metrics(training.run)
    losses = [item["metrics"]["loss"] for item in steps if "loss" in item["metrics"]]  # one that is NaN is not there
    return {
        "status": status,
        "seconds": round(elapsed(training), 3),
        "steps": len(steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "recomputed": str(session.recomputed["sft"]) if "sft" in session.recomputed else None,
        "mlflow_run_id": session.mlflow_run_id,
    }
