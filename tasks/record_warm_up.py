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
    append_steps(training.run.warm_up, {step: {"loss": loss} for step, loss in enumerate(losses, start=first + 1)})
    log_warm_up(training)


def log_warm_up(training: Training) -> None:
    """Log the recorded steps that the MLflow run does not hold; a loss that is not finite becomes a gap."""
    from mlflow.entities import Metric

    session, now_ms = training.session(), time.time_ns() // 1_000_000
    client, run_id = mlflow_run.connect(session.tracking_uri), session.mlflow_run_id
    held = max((entry.step for entry in client.get_metric_history(run_id, LOSS)), default=0)
    losses = {record["iteration"]: record["metrics"]["loss"] for record in read_metrics(training.run.warm_up)}
    new = iter(
        [
            Metric(LOSS, loss if math.isfinite(loss) else math.nan, now_ms, step)
            for step, loss in losses.items()
            if step > held
        ]
    )
    while batch := list(islice(new, STEPS_PER_CALL)):
        client.log_batch(run_id, metrics=batch)
