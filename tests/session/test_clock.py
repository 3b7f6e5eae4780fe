"""An iteration's seconds reach from the end of the one before to its own end, without checkpoints."""

from __future__ import annotations

import pytest

from penstock.session import clock as module
from penstock.session.clock import LapClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day, which a test moves."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_nothing_between_two_laps_is_lost_and_checkpoints_are_left_out(now: list[float]) -> None:
    """Laps add up to all the time there was; without the block out of the lap the second would have its seconds."""
    clock = LapClock()
    clock.lap()
    now[0] += 3.0
    assert clock.lap().seconds == 3.0
    now[0] += 0.5
    with clock.stopped():
        now[0] += 60.0
    now[0] += 2.0
    assert clock.lap().seconds == 2.5


def test_a_lap_holds_the_tasks_that_ended_in_it_but_those_left_out(now: list[float]) -> None:
    """A checkpoint is in no lap. Control: the same task outside of the stopped clock is."""
    clock = LapClock()
    clock.lap()
    with clock.timed("rollout"):
        now[0] += 2.0
    with clock.stopped(), clock.timed("checkpoint"):
        now[0] += 9.0
    with clock.timed("reward"):
        now[0] += 1.0
    assert [(span.task, span.seconds) for span in clock.lap().spans] == [("rollout", 2.0), ("reward", 1.0)]
    with clock.timed("checkpoint"):
        now[0] += 9.0
    assert [(span.task, span.seconds) for span in clock.lap().spans] == [("checkpoint", 9.0)]


def test_of_a_task_that_goes_on_while_the_clock_stands_the_lap_holds_the_rest(now: list[float]) -> None:
    """The next rollout generates while a checkpoint is written: its share of the lap is at most 1.

    Control: its own seconds, which are recorded as the rollout's, are all 8.
    """
    clock = LapClock()
    clock.lap()
    now[0] += 1.0
    began = now[0]
    now[0] += 0.5
    with clock.stopped():
        now[0] += 6.0
    now[0] += 0.5
    with clock.timed("rollout") as span:
        now[0] += 1.0
        span.began = began
    assert span.seconds == 8.0
    lap = clock.lap()
    assert [(span.task, span.seconds) for span in lap.spans] == [("rollout", 2.0)]
    assert lap.seconds == 3.0


def test_a_task_that_fails_is_in_no_lap(now: list[float]) -> None:
    """What it was done for did not happen; a retry counts by itself."""
    clock = LapClock()
    with pytest.raises(RuntimeError), clock.timed("reward"):
        raise RuntimeError
    assert not clock.lap().spans
