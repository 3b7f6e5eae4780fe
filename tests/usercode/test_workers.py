"""Worker processes: what is lost is named and replaced, and nobody waits for what will not come.

What they start ends with them: tests/rewards/test_kept.py.
"""

from __future__ import annotations

import operator
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.usercode.guard import begin_worker
from penstock.usercode.workers import LOOK_S, Call, Workers, loss, ready
from tests.waiting import came_true


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers[None]]:
    """One process."""
    with closing(Workers(1, begin_worker, (), ready)) as found:
        yield found


def process_of(workers: Workers[None]) -> int:
    return workers.call(os.getpid).future.result(60)


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (time.sleep, 60, "too long"),
        (os._exit, 7, "it died (exit code 7)"),
        (int, "seven", "ValueError: invalid literal for int() with base 10: 'seven'"),
    ],
)
def test_a_lost_call_is_named_and_the_next_is_answered(
    workers: Workers[None], function: Callable[..., Any], argument: Any, reason: str
) -> None:
    """A process that is lost is replaced; control: one whose function only raised stays."""
    before = process_of(workers)
    error = workers.call(function, argument, deadline_s=0.3).future.exception(60)
    assert error is not None and loss(error, "it", "too long") == reason
    assert (process_of(workers) == before) == (function is int)


def test_a_process_that_dies_before_anyone_knows_its_call_has_died_as_well() -> None:
    """Pebble's words for that name neither a process nor an exit code."""
    assert loss(BrokenProcessPool("All workers expired"), "it", "too long") == "it died"


def test_a_pool_that_breaks_as_it_gets_its_first_call_says_so_at_once() -> None:
    """Pebble drops a call that comes in that moment. Control: as long as the pool lives the answer is waited for."""
    with closing(Workers(1, begin_worker, (), ready)) as workers, ThreadPoolExecutor(1) as thread:
        pool = workers.call(os.getpid).pool
        workers.started("it loads here", "there")
        workers._starting = Future()
        workers._starting.set_result(Call(Future(), pool))  # one that nobody answers
        waiting = thread.submit(workers.started, "it loads here", "there")
        time.sleep(3 * LOOK_S)
        assert not waiting.done()
        pool.stop()
        with pytest.raises(UserError, match="it loads here but not in a worker process"):
            waiting.result(20)


def test_a_broken_pool_is_replaced_and_what_it_had_not_taken_on_ends(workers: Workers[None]) -> None:
    """The out-of-memory killer may take an idle worker. Control: while the pool lives the call is under way."""
    before, old = process_of(workers), workers._pool
    sent = Call[int](Future(), old)
    assert workers.ended([sent], 0) == []
    os.kill(before, signal.SIGKILL)
    assert came_true(lambda: not old.active, 20)
    assert workers.ended([sent], 0) == [sent]
    assert isinstance(sent.future.exception(), BrokenProcessPool)
    assert process_of(workers) != before


def test_a_start_that_fails_is_the_users_error() -> None:
    """It says what does load, and where the traceback stands."""
    with (
        closing(Workers(1, operator.truediv, (1, 0), ready)) as broken,
        pytest.raises(UserError, match="x loads here but not in a worker process(.|\n)*stands above"),
    ):
        broken.started("x loads here", "above")


@pytest.mark.parametrize("taken_on", [True, False])
def test_who_waits_for_a_start_is_released_when_the_workers_are_closed(taken_on: bool) -> None:
    """A module may import for minutes, and Pebble may not have looked at the call. Control: until then it waits."""
    slow = Workers(1, time.sleep, (250,), ready)
    if not taken_on:
        pool = slow._starting.result().pool
        slow._starting = Future()
        slow._starting.set_result(Call(Future(), pool))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(slow.started, "x loads here", "above")
        assert not came_true(waiting.done, 0.5)
        slow.close()
        with pytest.raises(CancelledError):
            waiting.result(20)
    with pytest.raises(RuntimeError, match="closed"):
        slow.call(os.getpid)
