"""Shows a running training on the terminal; nothing where there is none to show it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reports.progress import TrainingProgress
from state.manifest import read_manifest
from tasks.session import Training


@contextmanager
def show_progress(training: Training) -> Iterator[None]:
    """Show phases and iterations while the context lasts; a resumed run starts where its manifest stands.

    The record is what a flow opens next (tasks/record.py).
    """
    session = training.session()
    done = read_manifest(training.run).progress if training.run.manifest.is_file() else None
    with TrainingProgress() as session.progress:
        session.seconds_before = done.seconds if done else 0.0
        session.progress.phase("opening the record in MLflow")
        yield


def show_iterations(training: Training, done: int) -> None:
    """Begin the bar of iterations, `done` of them already behind."""
    progress = training.session().progress
    if progress is not None:
        progress.start(training.config.iterations, done)
