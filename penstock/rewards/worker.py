"""What runs inside a worker process: the user's reward function, under a deadline, with every failure made a value.

Three deadlines, from the inside out: SIGALRM ends Python code after `timeout_s`; `asyncio.timeout` does it for a
coroutine; and code in which no signal handler of Python runs (a loop or a deadlock in C; `re` does look for signals) is
ended by killing this process from outside (penstock/rewards/pool.py). For the last to come soon, a chunk of many rows
stops early and hands back its unscored rows once it has used `timeout_s`: so no chunk lasts longer than twice that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.rewards.function import RewardFunction, load_reward_function
from penstock.rewards.types import TIMED_OUT, Row, Score
from penstock.usercode.guard import DeadlineExceeded, begin_worker, reason_of, reward_and_parts, within, within_loop
from penstock.usercode.prints import errors_too, print_to


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
            if not isinstance(values, Iterable):
                raise TypeError(f"returned {values!r:.40} for {len(rows)} rows, not a list of as many numbers")
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
        with within(self.timeout_s):
            return self.function.callable(**arguments)

    async def _await(self, arguments: dict[str, Any]) -> Any:
        async with within_loop(self.timeout_s):
            return await self.function.callable(**arguments)

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, DeadlineExceeded):
            return Score(self.failure_value, {}, f"{TIMED_OUT} {self.timeout_s:g} s")
        return Score(self.failure_value, {}, reason_of(error, __file__))


def _as_score(value: object) -> Score:
    """The score that a returned value stands for; raises TypeError or ValueError for what is not a finite number."""
    reward, parts = reward_and_parts(value)
    return Score(reward, parts, None)


# ---- the process ---------------------------------------------------------------------------------------------------

_scorer: ChunkScorer


def start(
    spec: str, settings: dict[str, Any], columns: list[str], timeout_s: float, failure_value: float, log: str | None
) -> None:
    """Prepare this worker process; runs once, before its first chunk.

    Args:
        log: file for what the function prints; None: standard error.
    """
    global _scorer
    begin_worker()
    if log is not None:
        print_to(log)
    _scorer = ChunkScorer(load_reward_function(spec, settings, columns), timeout_s, failure_value)
    if log is not None:
        errors_too()


def score_chunk(rows: list[Row]) -> list[Score]:
    """`ChunkScorer.score` in this worker."""
    return _scorer.score(rows)
