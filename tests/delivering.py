"""A training that is recorded in MLflow, a server of it, and waiting for what a tracker gets on a thread of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from penstock.session.session import Training
from penstock.state.manifest import Tracked, read_manifest
from penstock.state.run_folder import RunFolder
from penstock.trackers.delivery import Delivery
from penstock.trackers.mlflow import MlflowTracker
from penstock.trackers.outbox import Outbox
from penstock.trackers.tracker import ITERATION, Figures, NewRun, Tracker
from tests.waiting import until


def begun(uri: str, name: str = "tiny", experiment: str = "exp") -> MlflowTracker:
    """Begin an MLflow run in a store."""
    tracker = MlflowTracker(uri)
    tracker.open(NewRun(name, experiment, {}))
    return tracker


def log_iteration(tracker: Tracker, iteration: int, values: Mapping[str, float]) -> None:
    """Log an iteration as it comes first."""
    tracker.log([Figures(iteration, {**values, ITERATION: float(iteration)})])


def tracked_run(run: RunFolder) -> str:
    """Return what its tracker, or the first of several, calls a run."""
    return read_manifest(run).tracked[0].run


def in_mlflow(training: Training, uri: str) -> MlflowTracker:
    """Begin the MLflow run of a training."""
    session, tracker = training.session(), begun(uri)
    session.trackers, session.tracked = [tracker], (Tracked("mlflow", tracker.run),)
    return tracker


def with_outbox(training: Training) -> Training:
    """Begin to deliver what the training records, to its trackers' runs."""
    session = training.session()
    session.outboxes = [Outbox(Delivery(tracker)) for tracker in session.trackers]
    return training


def await_delivery(training: Training) -> None:
    """Wait until every tracker has all that was recorded."""
    outboxes = training.session().outboxes
    assert outboxes
    for outbox in outboxes:
        done = threading.Event()
        outbox.put("nothing more", done.set)
        assert done.wait(60)


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """Serve the MLflow store of a folder; killed at the end, with all its workers."""
    store = ["--backend-store-uri", f"sqlite:///{folder / 'served.db'}"]
    store += ["--artifacts-destination", str(folder / "served")]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes that nobody asks
    with (folder / "mlflow.txt").open("ab") as output:
        server = subprocess.Popen([*command, *store], env=environment, stdout=output, stderr=output)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), 120, "MLflow answers")
        yield
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
        server.wait(10)


def answers(url: str) -> bool:
    """Whether a server answers well."""
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
