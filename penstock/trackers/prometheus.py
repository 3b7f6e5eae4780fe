"""Prometheus as a tracker: the latest figures of a running training, which a server of Prometheus fetches from it.

The tracker answers `GET /metrics` from memory, on a thread of its own and one request after the other: a client that
dawdles holds up the next one for a few seconds, and never the training. Whoever wants the past of a figure finds it in
Prometheus; a resume begins with what the run folder holds, under the same labels.

Left out: histograms, tables, files and models; a push gateway; anything once the training has ended.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from penstock.base.errors import UserError
from penstock.trackers.tracker import ITERATION, Artifact, Figures, Model, NewRun, Status, Table

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PORT = 9464
PORT_VARIABLE = "PENSTOCK_METRICS_PORT"
STATUSES = ("running", "completed", "failed", "cancelled")

_PREFIX = "penstock_"
_LABELS = ("run", "experiment")
_REQUEST_S = 5.0  # for a client to say what it wants, and to take the answer


class PrometheusTracker:
    """The figures of one training, served on the loopback interface while it runs.

    Args:
        port: on which it listens.
    """

    label, page = "Prometheus", ""

    def __init__(self, port: int) -> None:
        self.run, self._port, self._experiment = "", port, ""
        self._lock = threading.Lock()
        self._steps: dict[str, set[int]] = {}
        self._latest: dict[str, _Value] = {}  # by the name of the metric
        self._iteration_ended = time.monotonic()
        self._status: Status | None = None
        self._server: WSGIServer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}/metrics"

    def open(self, new: NewRun) -> str:
        """Begin to serve a run's figures.

        Raises:
            UserError: the port is taken.
        """
        self.run = f"{new.experiment}/{new.name}"
        self.resume()
        return self.run

    def find(self, run: str) -> bool:
        """Be about a run that was begun earlier: of its figures nothing is held, so that it gets all of them."""
        self.run = run
        return True

    def resume(self) -> None:
        """Serve, if that is not so yet.

        Raises:
            UserError: the port is taken.
        """
        self._status = None
        if self._server is None:
            self._server = _listening(self._port, self)
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def configure(self, settings: Mapping[str, str]) -> bool:
        return False

    def log(self, figures: Sequence[Figures]) -> None:
        with self._lock:
            for item in figures:
                for name, value in item.values.items():
                    self._keep(name, item.step, value)

    def _keep(self, name: str, step: int, value: float) -> None:
        self._steps.setdefault(name, set()).add(step)
        metric = metric_name(name)
        if metric not in self._latest or step >= self._latest[metric].step:
            self._latest[metric] = _Value(name, step, value)
        if name == ITERATION:
            self._iteration_ended = time.monotonic()

    def logged(self, figure: str) -> set[int]:
        return set(self._steps.get(figure, ()))

    def logged_through(self) -> int:
        return max(self._steps.get(ITERATION, ()), default=-1)

    def table(self, table: Table) -> None:
        """Keep none."""

    def artifact(self, artifact: Artifact) -> None:
        """Keep none."""

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        return set()

    def model(self, model: Model) -> str | None:
        return None

    def status(self) -> Status | None:
        return self._status

    def close(self, status: Status, at_s: float) -> None:
        """Serve no longer; Prometheus then notes that the training is down."""
        self._status = status
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return what Prometheus gets, all of one moment."""
        with self._lock:
            latest, seconds = dict(self._latest), time.monotonic() - self._iteration_ended
        for metric, held in sorted(latest.items()):
            yield self._gauge(metric, f"{held.figure} as last recorded", [((), held.value)])
        yield self._gauge(f"{_PREFIX}seconds_since_iteration", "since the end of the last iteration", [((), seconds)])
        now = self._status or "running"
        states = [((status,), float(status == now)) for status in STATUSES]
        yield self._gauge(f"{_PREFIX}status", "1 for what the training is, 0 for the others", states, "status")

    def _gauge(
        self, metric: str, about: str, values: Sequence[tuple[tuple[str, ...], float]], *further: str
    ) -> GaugeMetricFamily:
        from prometheus_client.core import GaugeMetricFamily

        experiment, _, run = self.run.rpartition("/")
        family = GaugeMetricFamily(metric, about, labels=[*_LABELS, *further])
        for labels, value in values:
            family.add_metric([run, experiment, *labels], value)
        return family


class _Value(NamedTuple):
    """The value of a figure at a step."""

    figure: str
    step: int
    value: float


def metric_name(figure: str) -> str:
    """Return what Prometheus calls a figure.

    >>> metric_name("reward/mean"), metric_name("reward/pass@1_mean")
    ('penstock_reward_mean', 'penstock_reward_pass_1_mean')
    """
    return _PREFIX + re.sub(r"\W+", "_", figure, flags=re.ASCII).strip("_")


def made_for(folder: Path) -> PrometheusTracker:
    """Return the tracker of this process; the directory of the runs is of no use to it.

    Raises:
        UserError: the port in the environment is none.
    """
    return PrometheusTracker(port())


def port() -> int:
    """Return the port of PENSTOCK_METRICS_PORT, 9464 if it is not set.

    Raises:
        UserError: it is no port.
    """
    said = os.environ.get(PORT_VARIABLE, str(PORT))
    if not said.isdecimal() or not 0 < int(said) < 65536:
        raise UserError(f"{PORT_VARIABLE}={said} is no port", f"name one from 1 to 65535; the default is {PORT}")
    return int(said)


def port_is_free() -> None:
    """Refuse a port on which the figures cannot be served.

    Raises:
        UserError: it is taken, or none.
    """
    _listening(port()).server_close()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: it would be a line for every scrape."""


class _Server(WSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: it is about a client that has gone, or has said nothing in its time."""


def _listening(port: int, *collectors: PrometheusTracker) -> WSGIServer:
    """Return a server of what trackers collect, on the loopback interface; who serves it is the caller's matter."""
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        return make_server("127.0.0.1", port, make_wsgi_app(registry), _Server, _Handler)
    except OSError as error:
        raise UserError(
            f"the tracker 'prometheus' cannot listen on port {port}: {error.strerror}",
            f"name another port, {PORT_VARIABLE}=9465 for example: each training on a machine needs its own",
        ) from error
