"""Shows a running training: on the terminal, and as lines of the log on the pages of its flow runs in Prefect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prefect.runtime import flow_run

from penstock.reports.progress import TrainingProgress
from penstock.session.session import Training


@contextmanager
def show_progress(training: Training) -> Iterator[None]:
    """Show phases and iterations while the context lasts.

    The record is what a flow opens next (tasks/iteration/record.py).
    """
    session = training.session()
    with TrainingProgress(tell=partial(_log, flow_run.id)) as session.progress:
        session.progress.phase("opening the record")
        yield


def show_iterations(training: Training, done: int) -> None:
    """Begin the bar of iterations, `done` of them already behind."""
    progress = training.session().progress
    if progress is not None:
        progress.start(training.config.iterations, done)


def _log(training_run: str | None, text: str) -> None:
    """Add a line to Prefect's log of the training's flow run, and of the one that runs now: the iteration's.

    Only to what the server keeps. As a message of Prefect's logger it would be on the terminal, too, or nowhere: the
    command line asks for warnings.
    """
    logger = logging.getLogger("prefect.flow_runs")
    for name in {training_run, flow_run.id} - {None}:
        extra = {"flow_run_id": name}
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None, extra=extra)
        for handler in logger.handlers:
            handler.handle(record)
