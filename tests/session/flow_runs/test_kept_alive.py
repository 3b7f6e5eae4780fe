"""Crashes of a flow run that is kept alive are counted by its states; tests/flows/deployments sees it go on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Crashed, Pending, Running, Scheduled

from penstock.configs.sections.run import EngineConfig
from penstock.session.flow_runs.kept_alive import STARTED_AGAIN, FlowLostTooOften, counted

ENGINE = EngineConfig(restarts=2, restart_window_s=600.0)


def attempts(*ages_s: float, last: str = STARTED_AGAIN) -> list[State]:
    """Return the states of a flow run that crashed so many seconds ago each time, and was started again."""
    states = [Scheduled()]
    for age in ages_s:
        crashed = Crashed(timestamp=datetime.now(UTC) - timedelta(seconds=age))
        states += [Pending(), Running(), crashed, AwaitingRetry(message=STARTED_AGAIN)]
    states[-1] = states[-1].model_copy(update={"message": last})
    return [*states, Pending(), Running()]


def test_as_many_crashes_as_are_allowed_within_the_window_are_counted() -> None:
    """Control: one that is longer ago is not."""
    assert counted(attempts(20), ENGINE) == 1
    assert counted(attempts(400, 20), ENGINE) == 2
    assert counted(attempts(700, 400, 20), ENGINE) == 2


def test_a_crash_that_is_said_twice_counts_once() -> None:
    """By the process that waited and by its worker. Control: with a start in between they are two."""
    states = attempts(20)
    crashed = next(number for number, state in enumerate(states) if state.is_crashed())
    twice = [*states[: crashed + 1], *states[crashed:]]
    assert counted(twice, ENGINE) == 1
    assert counted([*states[: crashed + 1], Running(), *states[crashed:]], ENGINE) == 2


def test_one_crash_more_ends_the_run_in_words() -> None:
    """Naming what allows how many."""
    with pytest.raises(FlowLostTooOften, match=r"crashed 3 times within 600 s; engine.restarts allows 2"):
        counted(attempts(500, 400, 20), ENGINE)


def test_a_run_that_a_person_starts_again_goes_on_however_often_it_crashed() -> None:
    """By the button, whose state has other words. Control: the first attempt of a run."""
    assert counted(attempts(30, 20, 10, last="Retry"), ENGINE) == 0
    assert counted([Scheduled(), Pending(), Running()], ENGINE) == 0
