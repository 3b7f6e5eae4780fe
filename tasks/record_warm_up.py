"""Record the supervised warm-up inside `train`: the loss of each step, beside the figures of iterations.

Its steps are counted from 1 as iterations are, so they have a folder of their own in the run and, in the same MLflow
run, a metric of their own. Left out: `penstock sft`, whose record is of steps alone (tasks/supervised_record.py).
"""

from __future__ import annotations

import math
import time
from itertools import islice

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports import mlflow_run
from state.run_folder import append_steps, read_metrics
from tasks.session import Training

LOSS = "warm_up/loss"
STEPS_PER_CALL = 1000  # that MLflow takes


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_warm_up(training: Training, first: int, losses: list[float]) -> None:
    """Write down the loss of every step from step `first` on."""
    by_step = dict(enumerate(losses, start=first + 1))
    append_steps(training.run.warm_up, {step: {"loss": loss} for step, loss in by_step.items()})
    _log(training, by_step)


def log_warm_up(training: Training) -> None:
    """Log the recorded steps that the MLflow run does not hold."""
    session = training.session()
    held = mlflow_run.connect(session.tracking_uri).get_metric_history(session.mlflow_run_id, LOSS)
    session.warm_up_through = max((entry.step for entry in held), default=0)
    _log(training, {item["iteration"]: item["metrics"]["loss"] for item in read_metrics(training.run.warm_up)})


def _log(training: Training, losses: dict[int, float]) -> None:
    """Log the losses of steps that MLflow does not have; one that is not finite becomes a gap."""
    from mlflow.entities import Metric

    session, now_ms = training.session(), time.time_ns() // 1_000_000
    new = iter(
        [
            Metric(LOSS, loss if math.isfinite(loss) else math.nan, now_ms, step)
            for step, loss in losses.items()
            if step > session.warm_up_through
        ]
    )
    while batch := list(islice(new, STEPS_PER_CALL)):
        mlflow_run.connect(session.tracking_uri).log_batch(session.mlflow_run_id, metrics=batch)
    session.warm_up_through = max([session.warm_up_through, *losses])
