"""Shows a running training: on the terminal, and as lines of the log on the pages of its flow runs in Prefect."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from prefect.runtime import flow_run

from penstock.engines.commands.finetuning import Step, Stepped
from penstock.reports.progress import TrainingProgress
from penstock.session.session import Training


@contextmanager
def show_progress(training: Training, first: str = "opening the record") -> Iterator[None]:
    """Show phases and iterations while the context lasts.

    Args:
        first: what the flow does next; a training opens its record (penstock/tasks/iteration/record.py).
    """
    session = training.session()
    with TrainingProgress(tell=partial(_log, flow_run.id)) as session.progress:
        session.progress.phase(first)
        yield


def show_iterations(training: Training, done: int) -> None:
    """Begin the bar of iterations, `done` of them already behind, on the terminal and in Prefect."""
    progress = training.session().progress
    if progress is not None:
        progress.start(training.config.iterations, done)
    if (page := training.session().page) is not None:
        page.start(training.config.iterations, done)


def show_steps(training: Training, steps: int, done: int, what: str = "training") -> None:
    """Begin the bar of the optimizer steps of an offline training, `done` of them already behind."""
    if (progress := training.session().progress) is not None:
        progress.start(steps, done, "step", what)


def step_shown(training: Training, first: int, count: int) -> Callable[[Step | Stepped], None]:
    """Return what shows each step that the ranks tell of, of `count` from `first` on; the log has the last of them."""
    numbers, progress = itertools.count(first + 1), training.session().progress

    def show(told: Step | Stepped) -> None:
        if progress is not None and isinstance(told, Step):  # the reply of the first of several ranks tells no more
            number = next(numbers)
            progress.advance(number, told.figures, told=number == first + count)

    return show


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
