"""What MLflow gets of a run: in the order in which it came about, on a thread of its own, and each figure once.

The run folder is the truth and MLflow a view of it. So no iteration waits for MLflow: a task leaves what it has
recorded in the `Outbox`, and a server that goes away is asked again now and then, while the training goes on. What it
lacks at the end is in the run folder, from which `everything` delivers it (`penstock mlflow-sync`, and each resume).

Nothing here remembers across processes what was delivered: MLflow is asked, once after the start and once after each
failure, since a request whose answer was lost may have been served. Left out: opening and reopening the MLflow run,
which a training does wait for (tasks/iteration/record.py).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers import mlflow as mlflow_run
from penstock.trackers.mlflow import RunStatus

WARM_UP_LOSS = "warm_up/loss"
STEPS_PER_CALL = 1000  # that MLflow takes
RETRY_S = 10.0
PATIENCE_S = 30.0  # at the end of a run
STATUS: dict[str, RunStatus] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}

_logger = logging.getLogger(__name__)


class Delivery:
    """Gives an MLflow run what it lacks; not for several threads at a time.

    Args:
        tracking_uri: of the store.
        run_id: of the MLflow run.

    Attributes:
        sent: how often something was sent.
    """

    def __init__(self, tracking_uri: str, run_id: str) -> None:
        self.tracking_uri, self.run_id, self.sent = tracking_uri, run_id, 0
        self.forget()

    def forget(self) -> None:
        """Ask MLflow anew what it holds: something went wrong."""
        self._through: int | None = None
        self._steps: dict[str, set[int]] = {}  # where MLflow has a figure, by its name, as far as it was asked

    def figures(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the figures of an iteration, or more of them: only those that MLflow does not have there."""
        if self._through is None:
            self._through = mlflow_run.logged_through(self.tracking_uri, self.run_id)
        if iteration > self._through:
            self._send(mlflow_run.log_iteration, iteration, metrics)
            self._through, sent = iteration, metrics.keys()
        else:
            lacking = {name: value for name, value in metrics.items() if iteration not in self._steps_of(name)}
            if lacking:
                self._send(mlflow_run.log_figures, iteration, lacking)
            sent = lacking.keys()
        for name in sent & self._steps.keys():
            self._steps[name].add(iteration)

    def _steps_of(self, name: str) -> set[int]:
        if name not in self._steps:
            self._steps[name] = mlflow_run.steps_of(self.tracking_uri, self.run_id, name)
        return self._steps[name]

    def warm_up(self, losses: Mapping[int, float]) -> None:
        """Log the losses of the steps of a supervised warm-up; one that is not finite becomes a gap."""
        from mlflow.entities import Metric

        held, now_ms = self._steps_of(WARM_UP_LOSS), time.time_ns() // 1_000_000
        new = iter(
            [
                Metric(WARM_UP_LOSS, loss if math.isfinite(loss) else math.nan, now_ms, step)
                for step, loss in losses.items()
                if step not in held
            ]
        )
        while batch := list(islice(new, STEPS_PER_CALL)):
            mlflow_run.connect(self.tracking_uri).log_batch(self.run_id, metrics=batch)
            self.sent += 1
            held |= {metric.step for metric in batch}

    def samples(self, run: RunFolder, iteration: int) -> None:
        """Log the table of an iteration's samples, which lies in the run folder."""
        self._send(mlflow_run.log_samples, iteration, run.samples(iteration).read_text(encoding="utf-8"))

    def report(self, run: RunFolder) -> None:
        """Log the pages of the report."""
        mlflow_run.log_artifacts(self.tracking_uri, self.run_id, run.report.parent, "report")
        self.sent += 1

    def end(self, summary: str, status: RunStatus, at_s: float) -> None:
        """Log the summary and end the run as of a time since the epoch."""
        mlflow_run.connect(self.tracking_uri).log_text(self.run_id, summary, "summary.json")
        self._send(mlflow_run.close_run, status, int(at_s * 1000))

    def everything(self, run: RunFolder, through: int | None = None) -> None:
        """Give MLflow what it lacks of what the run folder holds: figures, tables of samples, the end if there is one.

        Args:
            through: the iteration or step from which the run goes on; None: it does not, and all counts.
        """
        for item in read_metrics(run):
            if through is None or item["iteration"] <= through:
                self.figures(item["iteration"], item["metrics"])
        if losses := {item["iteration"]: item["metrics"]["loss"] for item in read_metrics(run.warm_up)}:
            self.warm_up(losses)
        there = mlflow_run.files_of(self.tracking_uri, self.run_id, "samples")
        for path in sorted(run.samples(0).parent.glob("[0-9]*.json")):
            if there.get(f"samples/{path.name}") != path.stat().st_size:
                self.samples(run, int(path.stem))
        if through is None and run.summary.is_file():
            self._deliver_end(run)

    def _deliver_end(self, run: RunFolder) -> None:
        text = run.summary.read_text(encoding="utf-8")
        status = STATUS[json.loads(text)["status"]]
        held = mlflow_run.files_of(self.tracking_uri, self.run_id, None)
        ended = mlflow_run.status_of(self.tracking_uri, self.run_id) == status
        if ended and held.get(run.summary.name) == run.summary.stat().st_size:
            return
        if run.report.is_file():
            self.report(run)
        self.end(text, status, run.summary.stat().st_mtime)

    def _send(self, log: Callable[..., None], *arguments: object) -> None:
        log(self.tracking_uri, self.run_id, *arguments)
        self.sent += 1


class Outbox:
    """A thread that delivers one thing after the other, and begins again with the one that failed.

    Args:
        delivery: what it works with.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._finishing = self._left = False
        self._reason = ""
        # A daemon: a request that hangs keeps no process from ending.
        self._thread = threading.Thread(target=self._deliver, name="mlflow", daemon=True)
        self._thread.start()

    def put(self, label: str, deliver: Callable[[], None]) -> None:
        """Have something delivered after all that was put before, and return at once.

        Args:
            label: what it is, for people.
        """
        with self._changed:
            self._waiting.append((label, deliver))
            self._changed.notify_all()

    def finish(self, patience_s: float = PATIENCE_S) -> str:
        """Wait until all is delivered, an attempt fails or patience ends; say what is not, empty if nothing is."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left, patience_s)
            self._left = True
            if not self._waiting:
                return ""
            server = mlflow_run.public_uri(self.delivery.tracking_uri)
            reason = self._reason or f"no answer for {patience_s:g} s"
            return f"MLflow ({server}) lacks this run from {self._waiting[0][0]} on: {reason}"

    def _deliver(self) -> None:
        for label, deliver, last in self._attempts():
            try:
                deliver()
            except Exception as error:  # whatever it is: the training and its folder do not depend on it
                self.delivery.forget()
                self._failed(label, error, last)
            else:
                self._delivered()
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _attempts(self) -> Iterator[tuple[str, Callable[[], None], bool]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._finishing)
                if self._left or not self._waiting:
                    return
                label, deliver = self._waiting[0]
                last = self._finishing
            yield label, deliver, last

    def _delivered(self) -> None:
        with self._changed:
            self._waiting.popleft()
            if self._reason:
                _logger.warning("MLflow answers again and gets what it lacks")
            self._reason = ""

    def _failed(self, label: str, error: Exception, last: bool) -> None:
        """Wait before the next attempt; the one that was begun at the end of the run is the last."""
        with self._changed:
            if not self._reason:
                server = mlflow_run.public_uri(self.delivery.tracking_uri)
                said = "MLflow (%s) does not take %s: the training goes on, and MLflow gets it later. %s"
                _logger.warning(said, server, label, _short(error))
            self._reason = _short(error)
            self._left = self._left or last
            self._changed.wait_for(lambda: self._finishing, RETRY_S)


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
