"""Record the supervised warm-up inside `train`: the loss of each step, beside the figures of iterations.

Its steps are counted from 1 as iterations are, so they have a folder of their own in the run and, in the same MLflow
run, a metric of their own. Left out: `penstock sft`, whose record is of steps alone (tasks/supervised_record.py).
"""

from __future__ import annotations

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from state.run_folder import append_steps
from tasks.session import Training


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_warm_up(training: Training, first: int, losses: list[float]) -> None:
    """Write down the loss of every step from step `first` on."""
    by_step = dict(enumerate(losses, start=first + 1))
    append_steps(training.run.warm_up, {step: {"loss": loss} for step, loss in by_step.items()})
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"step {first + 1} of the warm-up", partial(outbox.delivery.warm_up, by_step))
