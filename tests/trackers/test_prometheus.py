"""What Prometheus fetches from a running training: the latest figures, from memory, on the loopback interface alone."""

from __future__ import annotations

import math
import socket
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.base.errors import UserError
from penstock.checks.training import check_supervised
from penstock.cli.runs.sync import sync
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.interface import free_port
from penstock.session.record import append_record
from penstock.session.session import Training
from penstock.state.manifest import Progress
from penstock.tasks.iteration import record
from penstock.tasks.iteration.checkpoint import begin_manifest
from penstock.trackers import prometheus
from penstock.trackers.prometheus import PORT_VARIABLE, PrometheusTracker
from penstock.trackers.tracker import ITERATION, Figures, NewRun
from tests.delivering import await_delivery
from tests.trackers.test_added import TINY, recorded_training
from tests.waiting import came_true

RUN = {"run": "run", "experiment": "adding"}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """That of the environment."""
    number = free_port("127.0.0.1")
    monkeypatch.setenv(PORT_VARIABLE, str(number))
    return number


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> Callable[[], Training]:
    """Make a training that Prometheus watches, or a later attempt at it."""
    return partial(recorded_training, tmp_path, monkeypatch, "prometheus")


def scraped(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and values by the name of the metric, read as Prometheus' own library does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}


def gone(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_training_shows_its_latest_figures_while_it_runs(make: Callable[[], Training], port: int) -> None:
    """By valid names, with run and experiment; a resume has those of before. Controls: nothing before, nor after."""
    training = make()
    assert gone(port)
    with training.session().consolidator, record.recording(training):
        assert scraped(port)["penstock_status"] == [
            ({**RUN, "status": status}, float(status == "running")) for status in prometheus.STATUSES
        ]
        append_record(training, 1, {"reward/mean": 0.1, "reward/pass@1_mean": 0.5, "actor/kl": math.nan})
        append_record(training, 2, {"reward/mean": 0.2, "3rd": 3.0})
        append_record(training, 1, {"checkpoint/gib": 1.5})
        begin_manifest(training, Progress(iteration=2))
        await_delivery(training)
        found = scraped(port)
        assert found["penstock_reward_mean"] == [(RUN, 0.2)]
        assert found["penstock_iteration"] == [(RUN, 2.0)]
        assert found["penstock_reward_pass_1_mean"] == [(RUN, 0.5)]
        assert found["penstock_checkpoint_gib"] == [(RUN, 1.5)]
        assert found["penstock_3rd"] == [(RUN, 3.0)]
        assert math.isnan(found["penstock_actor_kl"][0][1])
        assert 0 <= found["penstock_seconds_since_iteration"][0][1] < 60
    assert gone(port)

    training = make()
    with training.session().consolidator, record.recording(training):
        await_delivery(training)
        assert scraped(port)["penstock_reward_mean"] == [(RUN, 0.2)]
    with pytest.raises(UserError, match="never recorded in a tracker that keeps it"):
        sync(training.run.path)


def test_a_port_that_is_taken_is_said_before_anything_starts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do. Control: the same recipe with a free port comes to another mistake."""
    config = TrainConfig.model_validate({"record": {"tracker": ["mlflow", "prometheus"]}, "model": TINY})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError) as caught:
        check_supervised(config)
    assert caught.value.problem == f"the tracker 'prometheus' cannot listen on port {port}: Address already in use"
    assert f"{PORT_VARIABLE}=9465" in caught.value.remedy
    with pytest.raises(UserError, match="there is no 'sft' section"):
        check_supervised(config)
    monkeypatch.setenv(PORT_VARIABLE, "70000")
    with pytest.raises(UserError, match=f"{PORT_VARIABLE}=70000 is no port"):
        check_supervised(config)


def test_other_machines_reach_nothing(port: int) -> None:
    """The socket is bound to the loopback interface. Control: it answers there."""
    tracker = PrometheusTracker(port)
    tracker.open(NewRun("run", "adding", {}))
    assert tracker._server is not None
    assert tracker._server.socket.getsockname() == ("127.0.0.1", port)
    assert "penstock_status" in scraped(port)
    tracker.close("completed", 0.0)


def test_a_client_that_dawdles_holds_up_no_figure(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has connected and says nothing: figures are taken at once. Control: then others are answered."""
    monkeypatch.setattr(prometheus._Handler, "timeout", 1.0)
    tracker = PrometheusTracker(port)
    tracker.open(NewRun("run", "adding", {}))
    with socket.create_connection(("127.0.0.1", port)):
        logging = threading.Thread(target=tracker.log, args=([Figures(1, {"a": 1.0, ITERATION: 1.0})],))
        logging.start()
        logging.join(20)
        assert not logging.is_alive()
        assert scraped(port)["penstock_a"] == [(RUN, 1.0)]
    tracker.close("completed", 0.0)
    assert came_true(lambda: gone(port), 10)


def test_two_figures_of_one_name_are_one_metric(port: int) -> None:
    """Prometheus would refuse the whole answer otherwise: the one that came last counts. Control: others are there."""
    tracker = PrometheusTracker(port)
    tracker.open(NewRun("run", "adding", {}))
    tracker.log([Figures(1, {"a/b": 1.0, "a b": 2.0, "c": 3.0})])
    found: dict[str, Any] = scraped(port)
    assert found["penstock_a_b"] == [(RUN, 2.0)]
    assert found["penstock_c"] == [(RUN, 3.0)]
    tracker.close("completed", 0.0)
