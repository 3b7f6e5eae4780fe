"""SIGTERM ends a flow also where it comes while Prefect's own code runs, and as what it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import pytest
from prefect import flow, task, task_engine
from prefect.exceptions import TerminationSignal
from prefect.utilities import engine

from penstock.session import prefect as session_prefect
from penstock.session.prefect import terminations_heard

pytestmark = pytest.mark.usefixtures("prefect_harness")


@task
def step() -> None:
    """Do nothing."""


@flow
def child() -> None:
    """Run a task, as an iteration does."""
    step()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What comes of the signal that Prefect sends again once a flow has ended by one; else it ended this process."""
    came: list[int] = []
    monkeypatch.setattr(session_prefect, "OWN", frozenset({"tests"}))
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes whenever Prefect begins a task run, in the midst of its own code."""
    begin: Any = task_engine._create_task_run_locally

    def hit(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return begin(*arguments, **named)

    as_prefects = {"__name__": "prefect.task_engine", "os": os, "signal": signal}
    inside = FunctionType(hit.__code__, as_prefects, closure=hit.__closure__)
    monkeypatch.setattr(task_engine, "_create_task_run_locally", inside)


@pytest.mark.parametrize("heard", [True, False])
def test_what_comes_while_prefect_begins_a_task_ends_the_flow(heard: bool, repeated: list[int], hit: None) -> None:
    """As a termination. Control: Prefect by itself makes an error of the program of it, and nobody asks for an end."""
    ended: list[type[BaseException]] = []

    @flow
    def training() -> None:
        with terminations_heard() if heard else nullcontext():
            try:
                child()
                time.sleep(10)
            except BaseException as error:
                ended.append(type(error))
                raise

    with pytest.raises(TerminationSignal if heard else ValueError):
        training()
    assert ended == [TerminationSignal if heard else ValueError]
    assert bool(repeated) is heard


def test_it_is_not_waited_for_longer_than_that(repeated: list[int], hit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Prefect never gives way it is raised all the same."""
    monkeypatch.setattr(session_prefect, "PATIENCE_S", 0.0)

    @flow
    def training() -> None:
        with terminations_heard():
            child()

    with pytest.raises(ValueError, match="not set"):
        training()


def test_prefect_has_its_own_handler_back_afterwards(repeated: list[int]) -> None:
    """Also where the training fails; and outside of a flow nothing is replaced."""
    before = signal.getsignal(signal.SIGTERM)
    with terminations_heard():
        assert signal.getsignal(signal.SIGTERM) is before
    prefects = engine._prefect_sigterm_handler

    @flow
    def training() -> None:
        assert signal.getsignal(signal.SIGTERM) is prefects
        with terminations_heard():
            assert signal.getsignal(signal.SIGTERM) is engine._prefect_sigterm_handler is not prefects
            child()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        training()
    assert engine._prefect_sigterm_handler is prefects
    assert signal.getsignal(signal.SIGTERM) is before
