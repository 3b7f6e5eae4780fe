"""The record of supervised steps: each once in folder and store, however often an attempt ends between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session.session import Training
from penstock.state.manifest import Progress, read_manifest
from penstock.state.run_folder import read_metrics, truncate_metrics
from penstock.tasks.finetuning.record import record_steps, recording_supervised
from penstock.tasks.iteration.checkpoint import begin_manifest
from penstock.trackers.mlflow import connect, default_tracking_uri
from tests.delivering import tracked_run


def losses(*values: float) -> list[dict[str, float]]:
    """Return figures of steps with a loss each."""
    return [{"loss": value} for value in values]


def test_steps_are_recorded_once(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that is interrupted has a summary, too; the next goes on in its MLflow run, from its checkpoint."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrainConfig.model_validate({"sft": {"steps": 5}, "record": {"experiment": "supervising"}})
    training = training_with(config)
    run = training.run
    run.config.write_text("name: x\n")
    with pytest.raises(KeyboardInterrupt), recording_supervised(training):
        begin_manifest(training, Progress())
        record_steps.fn(training, 0, losses(3.0, 2.5))
        record_steps.fn(training, 2, losses(2.0))
        raise KeyboardInterrupt
    cut = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (cut["status"], cut["steps"], cut["loss_first"], cut["loss_last"]) == ("cancelled", 3, 3.0, 2.0)

    training = training_with(config)
    with recording_supervised(training):
        assert training.session().tracked == read_manifest(run).tracked
        assert tracked_run(run) == cut["tracked"][0]["run"]
        truncate_metrics(run, 2)
        before = run.metrics.stat().st_ino
        record_steps.fn(training, 2, losses(2.0, 1.5, 1.0))
        assert run.metrics.stat().st_ino == before, "what is recorded is not written again"
    assert [(item["iteration"], item["metrics"]["loss"]) for item in read_metrics(run)] == [
        *((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5), (5, 1.0))
    ]
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"], summary["loss_last"]) == ("completed", 5, 1.0)
    client = connect(default_tracking_uri(run.path.parent))
    history = client.get_metric_history(summary["tracked"][0]["run"], "loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5), (5, 1.0)]
    assert client.get_run(summary["tracked"][0]["run"]).info.status == "FINISHED"


def test_a_loss_that_does_not_exist_is_left_out(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no NaN. Control: its step is counted, and MLflow shows the gap."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    training = training_with(TrainConfig.model_validate({"sft": {"steps": 3}, "record": {"experiment": "gaps"}}))
    run = training.run
    run.config.write_text("name: x\n")

    def refused(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    with recording_supervised(training):
        record_steps.fn(training, 0, losses(math.nan, 2.0, math.inf))
    assert [json.loads(line, parse_constant=refused)["metrics"] for line in run.metrics.read_text().splitlines()] == [
        *({"alarm/loss_rises": 0.0}, {"loss": 2.0, "alarm/loss_rises": 0.0}, {"alarm/loss_rises": 0.0})
    ]
    assert [item["metrics"] for item in read_metrics(run)] == [
        *({"alarm/loss_rises": 0.0}, {"loss": 2.0, "alarm/loss_rises": 0.0}, {"alarm/loss_rises": 0.0})
    ]
    found = json.loads(run.summary.read_text(encoding="utf-8"), parse_constant=refused)
    assert (found["steps"], found["loss_first"], found["loss_last"]) == (3, 2.0, 2.0)
    client = connect(default_tracking_uri(run.path.parent))
    assert [entry.step for entry in client.get_metric_history(found["tracked"][0]["run"], "loss")] == [1, 2, 3]
