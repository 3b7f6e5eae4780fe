"""Processes that run a user's code, for a caller that hangs with none of them and outlives them all.

Such code is untrusted in its running time and its stability: it may loop, crash or hang in C. Pebble's pool ends a
process whose call overruns and starts another. Added here: each process has a keeper, so nothing that it starts stays
(kept.py); the caller need not wait for starts; a pool that breaks, as Pebble's does when a worker dies while it is
idle (out of memory, say), is replaced, and calls that were lost with it end.

Workers are spawned, so a script that trains needs the usual `if __name__ == "__main__":`. Left out: what runs inside
(guard.py has its deadline), and what becomes of the work whose call was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pebble import ProcessExpired, ProcessPool

from penstock.base.errors import UserError
from penstock.usercode import sandboxed
from penstock.usercode.kept import Kept
from penstock.usercode.sandbox import Sandbox

LOOK_S = 0.5
GRACE_S = 1.0  # beyond the deadlines inside a worker, before it is killed

_START_TIMEOUT_S = 300.0  # importing the user's module may import a framework from a cold disk

Answer = TypeVar("Answer")
Ready = TypeVar("Ready")


@dataclass(frozen=True, eq=False)
class Call(Generic[Answer]):
    """A call that was sent, and the pool that it was sent to."""

    future: Future[Answer]
    pool: ProcessPool


class Workers(Generic[Ready]):
    """Worker processes, of which each runs one call at a time; returns at once, while they start.

    Args:
        count: of processes.
        start: runs once in each, before its first call, with `arguments`.
        ready: its answer in the first process says that workers have started.
        sandbox: in which `start` and all calls run; None: in none. Functions that are called in one say by their
            annotations what they return.
    """

    def __init__(
        self,
        count: int,
        start: Callable[..., None],
        arguments: tuple[Any, ...],
        ready: Callable[[], Ready],
        sandbox: Sandbox | None = None,
    ) -> None:
        self._sandboxed = sandbox is not None
        if sandbox is not None:
            start, arguments = sandboxed.start, (sandbox, start, arguments)
        self._new_pool = partial(ProcessPool, count, initializer=start, initargs=arguments, context=Kept())
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="workers")
        self._changing, self._closed = threading.Lock(), False
        self._begin()

    def started(self, loads: str, where: str) -> Ready:
        """Wait for the first process and return what `ready` said there.

        Args:
            loads: what loads, and where it does, for the message.
            where: the place of the workers' error output.

        Raises:
            UserError: no process starts.
        """
        try:
            return self._starting_answer()
        except (BrokenProcessPool, TimeoutError) as error:
            raise UserError(
                f"{loads} but not in a worker process.", f"The worker's traceback stands {where}."
            ) from error

    def _starting_answer(self) -> Ready:
        """Return what the first process answers.

        Raises:
            BrokenProcessPool: the pool broke. One that breaks in the moment in which it gets a call drops that.
            CancelledError: the workers were closed.
            TimeoutError: nothing has answered by the deadline.
        """
        call, deadline = self._starting.result(), time.monotonic() + _START_TIMEOUT_S
        while not call.future.done():  # for `wait` a cancelled one is not done before Pebble has looked at it
            if not call.pool.active and not self._closed and not call.future.done():
                raise BrokenProcessPool
            if time.monotonic() > deadline:
                raise TimeoutError
            wait([call.future], LOOK_S)
        return call.future.result()

    def call(self, function: Callable[..., Answer], *arguments: Any, deadline_s: float | None = None) -> Call[Answer]:
        """Have a function called by the next process that is free, which is killed `deadline_s` after it began.

        Raises:
            RuntimeError: the workers were closed.
        """
        pool = self._living_pool()
        return Call(self._schedule(pool, function, arguments, deadline_s), pool)

    def ended(self, calls: Collection[Call[Answer]], patience_s: float) -> list[Call[Answer]]:
        """Return the calls that have ended; wait for the first of them, but no longer than `patience_s`."""
        wait([call.future for call in calls], patience_s, FIRST_COMPLETED)
        pool = self._living_pool()
        for call in calls:
            if call.pool is not pool and not call.future.done():  # it broke before it took this on
                call.future.set_exception(BrokenProcessPool())
        return [call for call in calls if call.future.done()]

    def close(self) -> None:
        """End the processes, also those that are still starting or busy."""
        with self._changing:
            self._closed = True
            self._pool.stop()
        self._thread.shutdown()
        if self._starting.exception() is None:
            self._starting.result().future.cancel()  # Pebble gives no answers any more, and a thread may wait for one
        self._pool.join()

    def _living_pool(self) -> ProcessPool:
        with self._changing:
            if self._closed:
                raise RuntimeError("the workers are closed")
            if not self._pool.active:
                self._pool.join()
                self._begin()
            return self._pool

    def _begin(self) -> None:
        self._pool = self._new_pool()
        self._starting = self._thread.submit(self._start, self._pool)

    def _start(self, pool: ProcessPool) -> Call[Ready]:
        with self._changing:
            if self._closed:
                raise RuntimeError("the workers are closed")
            return Call(self._schedule(pool, self._ready), pool)

    def _schedule(
        self,
        pool: ProcessPool,
        function: Callable[..., Answer],
        arguments: tuple[Any, ...] = (),
        deadline_s: float | None = None,
    ) -> Future[Answer]:
        if self._sandboxed:
            return pool.schedule(sandboxed.call, args=(function, *arguments), timeout=deadline_s)
        return pool.schedule(function, args=arguments, timeout=deadline_s)


def default_workers(cores: int, most: int) -> int:
    """Return how many processes run a user's code where the recipe does not say: half of the cores, from 2 to `most`.

    Engines need the others.
    """
    return min(most, max(2, cores // 2))


def ready() -> None:
    """Do nothing: the answer says that a worker has started."""


def loss(error: BaseException, process: str, overran: str) -> str:
    """Return in words why a call has no answer.

    Args:
        error: of its future.
        process: what to call its process.
        overran: what to say of a call that took too long.
    """
    if isinstance(error, TimeoutError):
        return overran
    if isinstance(error, ProcessExpired):
        if error.exitcode in sandboxed.REASONS:
            return f"{process} {sandboxed.REASONS[error.exitcode]}; it was killed"
        return f"{process} died (exit code {error.exitcode})"
    if isinstance(error, BrokenProcessPool):  # before Pebble had heard which call it was working on
        return f"{process} died"
    return f"{type(error).__name__}: {error}"
