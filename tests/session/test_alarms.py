"""Alarms of a training: recorded every iteration, said once, also after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session import figures as module
from penstock.session.figures import alarms
from penstock.session.session import Training
from penstock.state.run_folder import append_metrics

CUT = {"rollout/truncated_share": 0.9}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings. Outside a flow there is no logger of Prefect's, which may say things of its own meanwhile."""
    messages: list[str] = []
    logger = logging.getLogger("alarms")
    monkeypatch.setattr(logger, "warning", lambda text, *values: messages.append(text % values))
    monkeypatch.setattr(module, "get_run_logger", lambda: logger)
    return messages


def test_an_alarm_is_said_once_and_recorded_while_it_lasts(
    training_with: Callable[[TrainConfig], Training], logged: list[str]
) -> None:
    """Five iterations bring it, better ones end it, and when it comes back nothing is said again."""
    training = training_with(TrainConfig())
    history = [CUT] * 7 + [{"rollout/truncated_share": 0.0}] + [CUT] * 6
    figures = [alarms(training, dict(metrics))["alarm/truncation"] for metrics in history]
    assert figures == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert len(logged) == 1
    assert "responses are cut" in logged[0]
    assert "rollout.max_response_tokens" in logged[0]


def test_a_resumed_run_goes_on_where_its_record_ends(
    training_with: Callable[[TrainConfig], Training], logged: list[str]
) -> None:
    """The iterations of the earlier process count, and what it said is not said again; iteration 0 is no iteration."""
    training = training_with(TrainConfig())
    append_metrics(training.run, 0, {"alarm/truncation": 1.0})
    for iteration in range(1, 5):
        append_metrics(training.run, iteration, CUT)
    assert alarms(training, dict(CUT)) == {"alarm/truncation": 1.0}
    assert len(logged) == 1

    append_metrics(training.run, 5, {**CUT, "alarm/truncation": 1.0})
    training.session().history.clear()
    assert alarms(training, dict(CUT)) == {"alarm/truncation": 1.0}
    assert len(logged) == 1


def test_an_alarm_of_long_ago_is_remembered_and_its_figures_are_not(
    training_with: Callable[[TrainConfig], Training], logged: list[str]
) -> None:
    """Also after a resume. What the process holds does not grow with the iterations."""
    training = training_with(TrainConfig())
    history = [CUT] * 12 + [{"rollout/truncated_share": 0.0}] * 100
    for iteration, metrics in enumerate(history, 1):
        append_metrics(training.run, iteration, metrics | alarms(training, dict(metrics)))
    assert len(training.session().history) < 40
    for _ in range(2):
        assert [alarms(training, dict(CUT))["alarm/truncation"] for _ in range(5)] == [0, 0, 0, 0, 1]
        assert len(logged) == 1
        training.session().history.clear()
        training.session().alarms_said.clear()


def test_responses_that_shall_not_end_are_not_cut(
    training_with: Callable[[TrainConfig], Training], logged: list[str]
) -> None:
    """With `rollout.ignore_eos` every response has the full length."""
    training = training_with(TrainConfig.model_validate({"rollout": {"ignore_eos": True}}))
    assert [alarms(training, dict(CUT)) for _ in range(6)] == [{}] * 6
    assert not logged
