"""Every loss is an event, and a training goes on after as many as its configuration allows within the window."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.group import HostLost, LostTooOften, RankLost, RolloutStalled
from penstock.session import events as module
from penstock.session.events import noted, recovered, tell_of_going_on
from penstock.session.session import Training
from penstock.state.events import read_events
from penstock.state.run_folder import append_metrics

LOST = RankLost("main", 1, "exited with signal 9 (SIGKILL)", Path("main-rank1.log"), unheard_s=0.2)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What Prefect gets; outside a flow there is no logger of its own."""
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("losses"))
    monkeypatch.setattr(module, "emit_event", lambda name, resource, payload: events.append((name, payload)))
    return events


def _training(training_with: Callable[[TrainConfig], Training], **engine: float) -> Training:
    return training_with(TrainConfig.model_validate({"engine": engine}))


def test_a_loss_is_told_everywhere(
    training_with: Callable[[TrainConfig], Training],
    sent: list[tuple[str, dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the run folder and in Prefect, and in a line of the log when it goes on and when it is over."""
    training = _training(training_with)
    append_metrics(training.run, 4, {"reward/mean": 0.5})
    training.session().say("update")
    noted(training, LOST)
    tell_of_going_on(training, LOST)
    recovered(training, "checkpoint 000003", 640)
    recovered(training, "checkpoint 000003", 640)  # of a start without a loss nothing is told
    lost, over = read_events(training.run)
    assert (lost["event"], lost["number"], lost["after"], lost["during"]) == ("RankLost", 1, 4, "update")
    assert (lost["group"], lost["rank"], lost["reason"], lost["unheard_s"]) == ("main", 1, LOST.reason, 0.2)
    assert (over["event"], over["number"], over["place"]) == ("recovered", 1, "checkpoint 000003")
    assert over["tokens_lost"] == 640
    assert over["recovered_s"] >= 0
    assert sent == [("penstock.RankLost", lost), ("penstock.recovered", over)]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "group main, rank 1",
        "recovered after 0.0 s",
    ]


@pytest.mark.usefixtures("sent")
def test_a_missed_deadline_is_told_with_what_the_flow_was_doing(
    training_with: Callable[[TrainConfig], Training], caplog: pytest.LogCaptureFixture
) -> None:
    """In the log; the event has the name of what it was. Control: of another loss the flow's stacks are not shown."""
    training = _training(training_with)
    noted(training, LOST)
    assert "stacks of the flow" not in caplog.text
    noted(training, RolloutStalled("main", 0, "no reply", Path("log"), flow_stacks="thread MainThread:\n  in wait"))
    assert "no reply\nstacks of the flow:\nthread MainThread:\n  in wait" in caplog.messages
    assert [event["event"] for event in read_events(training.run)] == ["RankLost", "RolloutStalled"]


@pytest.mark.usefixtures("sent")
def test_more_losses_than_allowed_end_the_run(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of restarts within restart_window_s; earlier losses count no more. Where none is allowed, the loss does."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    training = _training(training_with, restarts=2, restart_window_s=60.0)
    for clock[0] in (1000.0, 1030.0, 1061.0):
        noted(training, LOST)
    clock[0] = 1062.0
    with pytest.raises(LostTooOften, match="SIGKILL.*; of 3 losses within 60 s engine.restarts allows 2"):
        noted(training, LOST)
    assert [event["event"] for event in read_events(training.run)] == [*["RankLost"] * 4, "given up"]
    with pytest.raises(HostLost) as caught:
        noted(_training(training_with, restarts=0), host := HostLost("main", 0, "its host is lost", Path("log")))
    assert caught.value is host
