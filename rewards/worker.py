"""What runs inside a worker process: the user's reward function, under a deadline, with every failure made a value.

Three deadlines, from the inside out: SIGALRM ends Python code after `timeout_s`; `asyncio.timeout` does it for a
coroutine; and code in which no signal handler of Python runs (a loop or a deadlock in C; `re` does look for signals) is
ended by killing this process from outside (rewards/scoring.py). For the last to come soon, a chunk of many rows stops
early and hands back its unscored rows once it has used `timeout_s`: so no chunk lasts longer than twice that.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from rewards.function import RewardFunction, load_reward_function

Row = dict[str, Any]  # the arguments of one row, by parameter name

_PR_SET_PDEATHSIG = 1
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Score:
    """What one response is worth.

    Attributes:
        reward: the reward, or `reward.failure_value` if the call failed.
        parts: the named parts that the function returned; empty if it returned a number or failed.
        failure: why the call failed; None if it did not.
    """

    reward: float
    parts: dict[str, float]
    failure: str | None


class _DeadlineExceeded(BaseException):
    """Not an Exception, so that a reward function's `except Exception` does not swallow it."""


@dataclass(frozen=True)
class ChunkScorer:
    """Scores chunks of rows with one reward function; needs the main thread of its process (signals)."""

    function: RewardFunction
    timeout_s: float
    failure_value: float
    # One event loop for the life of the worker: clients that the user keeps between calls stay bound to it.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def score(self, rows: list[Row]) -> list[Score]:
        """Score at least the first row, and as many of the following as the time budget allows, in order."""
        if self.function.is_batch:
            return self._score_batch(rows)
        if self.function.is_async:
            return self.runner.run(self._score_together(rows))
        budget_ends = time.monotonic() + self.timeout_s
        scores: list[Score] = []
        for row in rows:
            if scores and time.monotonic() > budget_ends:
                break
            scores.append(self._score_row(row))
        return scores

    def _score_row(self, row: Row) -> Score:
        try:
            return _as_score(self._call(row))
        except BaseException as error:  # sys.exit() in a reward function is a failed row, too
            return self._failed(error)

    def _score_batch(self, rows: list[Row]) -> list[Score]:
        arguments = {name: [row[name] for row in rows] for name in self.function.wants}
        try:
            values = self.runner.run(self._await(arguments)) if self.function.is_async else self._call(arguments)
            values = list(values)
        except BaseException as error:
            return [self._failed(error)] * len(rows)
        if len(values) != len(rows):
            return [self._failed(ValueError(f"returned {len(values)} values for {len(rows)} rows"))] * len(rows)
        return [self._checked(value) for value in values]

    async def _score_together(self, rows: list[Row]) -> list[Score]:
        async def score(row: Row) -> Score:
            try:
                return _as_score(await self._await(row))
            except BaseException as error:
                return self._failed(error)

        return await asyncio.gather(*map(score, rows))

    def _checked(self, value: object) -> Score:
        try:
            return _as_score(value)
        except Exception as error:
            return self._failed(error)

    def _call(self, arguments: dict[str, Any]) -> Any:
        # The handler is set for every call because the function may use SIGALRM itself, and the clock is read because
        # it may have cancelled our alarm or swallowed the exception.
        signal.signal(signal.SIGALRM, _expire)
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        try:
            value = self.function.callable(**arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if time.monotonic() - started > self.timeout_s:
            raise _DeadlineExceeded
        return value

    async def _await(self, arguments: dict[str, Any]) -> Any:
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                return await self.function.callable(**arguments)
        except TimeoutError:  # ours, or one that the function raised by itself
            if deadline.expired():
                raise _DeadlineExceeded from None
            raise

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, _DeadlineExceeded):
            return Score(self.failure_value, {}, f"timed out after {self.timeout_s:g} s")
        return Score(self.failure_value, {}, _reason(error))


def _expire(*_: object) -> None:
    raise _DeadlineExceeded


def _as_score(value: object) -> Score:
    """The score that a returned value stands for; raises TypeError or ValueError for what is not a finite number."""
    if not isinstance(value, dict):
        return Score(_number(value, "the reward"), {}, None)
    if not value:
        raise ValueError("returned a dict without parts")
    parts = {str(name): _number(part, f"part '{name}'") for name, part in value.items()}
    return Score(parts["reward"] if "reward" in parts else sum(parts.values()), parts, None)


def _number(value: object, what: str) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number


def _reason(error: BaseException) -> str:
    """One line: the exception, and the line of the reward function that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = max((k for k, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    theirs = frames[ours + 1 :]
    where = f" ({Path(theirs[0].filename).name}:{theirs[0].lineno})" if theirs else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_LONGEST_REASON] + where


# ---- the process ---------------------------------------------------------------------------------------------------

_scorer: ChunkScorer


def start(spec: str, settings: dict[str, Any], columns: list[str], timeout_s: float, failure_value: float) -> None:
    """Prepare this worker process; runs once, before its first chunk."""
    global _scorer
    _die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would not run during a hang in C
    sys.stdout = sys.stderr  # what the function prints stays out of the command's output, and is not lost in a buffer
    _scorer = ChunkScorer(load_reward_function(spec, settings, columns), timeout_s, failure_value)


def ready() -> None:
    """Nothing: its answer says that a worker has started."""


def score_chunk(rows: list[Row]) -> list[Score]:
    """`ChunkScorer.score` in this worker."""
    return _scorer.score(rows)


def _die_with_parent() -> None:
    # The kernel sends this when the thread that started us ends, however its process dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it died before the call above
