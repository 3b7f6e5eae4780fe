"""The record of the warm-up: each step once in folder and store, and no iteration among them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session.record import append_record, begin_delivery
from penstock.session.session import Training
from penstock.state.manifest import Progress
from penstock.state.run_folder import append_metrics, read_metrics, truncate_metrics
from penstock.tasks.finetuning.record import record_warm_up
from penstock.tasks.iteration.checkpoint import begin_manifest
from penstock.trackers import mlflow as module
from penstock.trackers.delivery import WARM_UP_LOSS as LOSS
from penstock.trackers.mlflow import MlflowTracker, connect
from tests.delivering import await_delivery, in_mlflow, with_outbox
from tests.tasks.finetuning.test_record import losses


@pytest.fixture
def training(training_with: Callable[[TrainConfig], Training]) -> Training:
    """A training with an MLflow run."""
    training = training_with(TrainConfig.model_validate({"sft": {"steps": 5}}))
    opened(training)
    truncate_metrics(training.run.warm_up, -1)  # as restoring does before the first step
    return training


def opened(training: Training) -> None:
    in_mlflow(training, f"sqlite:///{training.run.path / 'mlflow.db'}")
    with_outbox(training)


def tracker_of(training: Training) -> MlflowTracker:
    (tracker,) = training.session().trackers
    assert isinstance(tracker, MlflowTracker)
    return tracker


def logged(training: Training, name: str) -> list[tuple[int, float]]:
    await_delivery(training)
    tracker = tracker_of(training)
    history = connect(tracker.uri).get_metric_history(tracker.run, name)
    return [(entry.step, entry.value) for entry in history]


def test_a_step_is_recorded_once_and_is_no_iteration(training: Training) -> None:
    """Also where steps after a checkpoint are taken again. Control: an iteration of the same number is its own."""
    run = training.run
    record_warm_up.fn(training, 0, losses(3.0, 2.5))
    record_warm_up.fn(training, 2, losses(2.0))
    assert read_metrics(run) == []
    await_delivery(training)
    assert tracker_of(training).logged_through() == -1, "no iteration counts as logged"
    truncate_metrics(run.warm_up, 2)  # a resume
    record_warm_up.fn(training, 2, losses(2.0, 1.5, 1.0))
    steps = [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5), (5, 1.0)]
    assert [(item["iteration"], item["metrics"]["loss"]) for item in read_metrics(run.warm_up)] == steps
    assert logged(training, LOSS) == steps
    append_record(training, 1, {"actor/loss": 0.5})
    assert logged(training, "actor/loss") == [(1, 0.5)]
    assert read_metrics(run) == [{"iteration": 1, "metrics": {"actor/loss": 0.5}}]
    assert logged(training, LOSS) == steps


def test_a_store_that_lost_the_run_gets_the_warm_up_again(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls of a size that MLflow takes. Control: the iterations that it lost, and no more than there are."""
    monkeypatch.setattr(module, "METRICS_PER_CALL", 2)
    record_warm_up.fn(training, 0, losses(3.0, 2.5, 2.0, 1.5, 1.0))
    append_metrics(training.run, 1, {"actor/loss": 0.5})
    begin_manifest(training, Progress())
    opened(training)
    assert logged(training, LOSS) == []
    begin_delivery(training, 1)
    assert logged(training, LOSS) == [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5), (5, 1.0)]
    assert logged(training, "actor/loss") == [(1, 0.5)]


def test_a_loss_that_is_not_finite_is_a_gap(training: Training) -> None:
    """MLflow would store infinity as 1.8e308."""
    record_warm_up.fn(training, 0, losses(math.inf, 2.0))
    (_, first), second = logged(training, LOSS)
    assert math.isnan(first)
    assert second == (2, 2.0)
