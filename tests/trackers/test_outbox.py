"""What a tracker gets, here MLflow: each figure once, whatever fails in between, and no caller waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.cli.runs.sync import sync
from penstock.state.events import append_event
from penstock.state.manifest import Manifest, Progress, Tracked, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics, append_steps, locked
from penstock.trackers import outbox as module
from penstock.trackers.delivery import WARM_UP_LOSS, Delivery
from penstock.trackers.mlflow import MlflowTracker, connect, default_tracking_uri
from penstock.trackers.outbox import Outbox
from penstock.trackers.tracker import table_text
from tests.delivering import begun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder with an MLflow run, and three iterations of which the second has a checkpoint."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("name: x\n")
    tracker = begun(default_tracking_uri(tmp_path))
    write_manifest(run, Manifest(Progress(), tracked=(Tracked("mlflow", tracker.run),)))
    for number in range(3):
        append_metrics(run, number, {"reward/mean": number / 10})
    append_metrics(run, 1, {"checkpoint/gib": 1.5})
    return run


def delivery_to(run: RunFolder) -> Delivery:
    tracker = MlflowTracker(default_tracking_uri(run.path.parent))
    (found,) = connect(tracker.uri).search_runs(["1"])
    assert tracker.find(found.info.run_id)
    return Delivery(tracker)


def store(delivery: Delivery) -> tuple[MlflowClient, str]:
    """MLflow's own client of the store, and the run's id in it."""
    assert isinstance(delivery.tracker, MlflowTracker)
    return connect(delivery.tracker.uri), delivery.tracker.run


def files(delivery: Delivery, folder: str) -> set[str]:
    """All that MLflow holds in a folder of the run."""
    client, run = store(delivery)
    return {item.path for item in client.list_artifacts(run, folder)}


def held(delivery: Delivery) -> dict[str, list[tuple[int, float]]]:
    """All that MLflow holds, by figure."""
    client, run = store(delivery)
    names = client.get_run(run).data.metrics
    histories = {name: client.get_metric_history(run, name) for name in names}
    return {name: [(entry.step, entry.value) for entry in history] for name, history in histories.items()}


WHOLE = {
    "reward/mean": [(0, 0.0), (1, 0.1), (2, 0.2)],
    "iteration": [(0, 0.0), (1, 1.0), (2, 2.0)],
    "checkpoint/gib": [(1, 1.5)],
}


def put_all(outbox: Outbox) -> None:
    """As a training does, line by line."""
    deliver = outbox.delivery.figures
    for number in range(3):
        outbox.put(f"iteration {number}", partial(deliver, number, {"reward/mean": number / 10}))
        if number == 1:
            outbox.put("its checkpoint", partial(deliver, 1, {"checkpoint/gib": 1.5}))


@pytest.mark.parametrize("stored", [True, False])
def test_each_figure_arrives_once_though_every_other_request_fails(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Before the store has it, or after, when only the answer was lost."""
    delivery, log_batch, calls = delivery_to(run), MlflowClient.log_batch, []

    def failing(*arguments: Any, **settings: Any) -> None:
        calls.append(stored)
        fails = len(calls) % 2 == 1
        if stored or not fails:
            log_batch(*arguments, **settings)
        if fails:
            raise ConnectionError("the answer was lost")

    monkeypatch.setattr(MlflowClient, "log_batch", failing)
    outbox = Outbox(delivery)
    put_all(outbox)
    done = threading.Event()
    outbox.put("nothing more", done.set)
    assert done.wait(60)
    assert outbox.finish() == ""
    assert held(delivery) == WHOLE
    assert len(calls) >= 4


def test_nobody_waits_for_a_store_that_hangs(run: RunFolder) -> None:
    """Neither who puts something in, nor the end of the run for longer than its patience; the first is named."""
    outbox, hangs = Outbox(delivery_to(run)), threading.Event()

    def hang() -> None:
        hangs.wait(60)

    outbox.put("iteration 0", hang)
    began = time.monotonic()
    put_all(outbox)
    assert "lacks this run from iteration 0 on: no answer for 0.2 s" in outbox.finish(0.2)
    assert time.monotonic() - began < 20
    hangs.set()


def test_a_store_that_refuses_ends_nothing_and_is_asked_once_more_at_the_end(run: RunFolder) -> None:
    """The end waits for that one attempt alone; what came before the failure is there. Control: nothing more is."""
    delivery, asked = delivery_to(run), threading.Semaphore(0)

    def refuse() -> None:
        asked.release()
        raise ConnectionError("refused")

    outbox = Outbox(delivery)
    outbox.put("iteration 0", lambda: delivery.figures(0, {"reward/mean": 0.0}))
    outbox.put("iteration 1", refuse)
    outbox.put("iteration 2", lambda: delivery.figures(2, {"reward/mean": 0.2}))
    assert asked.acquire(timeout=60)
    assert "lacks this run from iteration 1 on: ConnectionError: refused" in outbox.finish()
    assert held(delivery)["iteration"] == [(0, 0.0)]


def with_end(run: RunFolder, status: str = "completed") -> None:
    """What else a run leaves: a table, a warm-up, a report and a summary."""
    run.samples(0).parent.mkdir()
    write_text(run.samples(2), table_text([{"prompt": "p", "reward": 1.0}]))
    run.warm_up.path.mkdir()
    append_steps(run.warm_up, {1: {"loss": 3.0}, 2: {"loss": 2.0}})
    run.report.parent.mkdir()
    run.report.write_text("<p>")
    append_event(run, {"event": "RankLost", "number": 1})
    write_text(run.summary, json.dumps({"status": status}))


@pytest.mark.parametrize("came", [0, 2, 3, 4])
def test_a_run_is_delivered_later_and_once(run: RunFolder, came: int) -> None:
    """However much came while it ran; a second time changes nothing."""
    delivery = delivery_to(run)
    lines: list[Callable[[], None]] = [
        lambda: delivery.figures(0, {"reward/mean": 0.0}),
        lambda: delivery.figures(1, {"reward/mean": 0.1}),
        lambda: delivery.figures(1, {"checkpoint/gib": 1.5}),
        lambda: delivery.figures(2, {"reward/mean": 0.2}),
    ]
    for line in lines[:came]:
        line()
    with_end(run)
    assert sync(run.path).endswith("now holds all of it")
    client, run_id = store(delivery)
    whole = WHOLE | {WARM_UP_LOSS: [(1, 3.0), (2, 2.0)]}
    for again in (False, True):
        assert held(delivery) == whole
        found = client.get_run(run_id)
        assert found.info.status == "FINISHED"
        assert abs(found.info.end_time / 1000 - run.summary.stat().st_mtime) < 1
        assert files(delivery, "samples") == {"samples/000002.json"}
        assert files(delivery, "report") == {"report/index.html"}
        assert "events.jsonl" in files(delivery, "")
        assert "samples/000002.json" in found.data.tags["mlflow.loggedArtifacts"]
        if not again:
            assert sync(run.path).endswith("held all of it already")


def test_a_run_that_is_trained_or_that_its_tracker_does_not_know_is_refused(run: RunFolder) -> None:
    """Its own thread delivers; another store would get half of it. Control: the test above."""
    with locked(run), pytest.raises(UserError, match="trained by another process"):
        sync(run.path)
    client, run_id = store(delivery_to(run))
    client.delete_run(run_id)
    with pytest.raises(UserError, match="does not hold the run"):
        sync(run.path)
