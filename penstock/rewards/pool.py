"""Scoring a batch of responses with the user's reward function, in worker processes that can be lost.

A reward function may loop, crash or hang in C, and neither the training nor the rewards of the other samples may
suffer. What a worker process is, and how it ends, is penstock/usercode/workers.py; here a batch is cut into chunks, and
the row that was to blame for a lost one is found.

Left out: reward models, which are engines, and what servers give (penstock/rewards/source.py).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.base.errors import RewardTimeout, UserError
from penstock.rewards import worker
from penstock.rewards.function import load_reward_function
from penstock.rewards.server import NOT_ASKED
from penstock.rewards.types import NO_REPLY, TIMED_OUT, Row, Sample, Score
from penstock.usercode.prints import PrintLog
from penstock.usercode.sandbox import Sandbox
from penstock.usercode.workers import GRACE_S, Call, Workers, default_workers, loss, ready

if TYPE_CHECKING:
    from penstock.configs.sections.reward import RewardConfig


__all__ = ["RewardPool", "Sample", "Score", "check_failures", "log_first", "log_failures", "refuse_too_many"]

_logger = logging.getLogger(__name__)

_POLL_S = 1.0

_TURN_S = 0.05  # until a call looks again whether another has left a turn

_CHUNKS_PER_WORKER = 4

_LONGEST_CHUNK = 64

_FAILURES_SHOWN = 3

MOST_WORKERS = 32  # where the recipe does not say how many

_TURNS_PER_WORKER = 2  # chunks with the workers at a time: none waits for the next

_CALLS_AHEAD = 8  # so that a slow response delays few others

_BROKEN_POOLS = 3  # that a row is given to before it counts as the one that breaks them


class _Chunk(NamedTuple):
    rows: range
    broken: int  # pools that broke while they had them


class RewardPool:
    """Worker processes that score samples; a context manager that lives for a whole training.

    Entering returns at once, while the workers start; the first `score` waits for them.

    Args:
        config: the reward section, with a function.
        columns: names of the columns that the data rows have.
        log: file for what the function prints, in a folder of the run folder; None: the workers' standard error.

    Raises:
        UserError: the function cannot be loaded or called with these columns.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str], log: Path | None = None) -> None:
        if config.function is None:
            raise ValueError("a RewardPool needs reward.function")
        self._config = config
        self._columns = list(columns)
        self._count = config.workers or default_workers(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._function = load_reward_function(config.function, config.settings, columns)
        self._prints = None if log is None else PrintLog(log, f"reward.function '{config.function}'")
        # Pebble hands workers whatever is scheduled, and to cancel what one of them has costs a new process.
        self._turns = threading.Semaphore(_TURNS_PER_WORKER * self._count)
        self._told_of_timeouts = False
        self.calls_ahead = 0 if self._function.is_batch else _CALLS_AHEAD

    def __enter__(self) -> Self:
        config, log = self._config, None if self._prints is None else str(self._prints.path)
        start = (config.function, config.settings, self._columns, config.timeout_s, config.failure_value, log)
        self._workers = Workers(self._count, worker.start, start, ready, self._sandbox())
        return self

    def _sandbox(self) -> Sandbox | None:
        if self._config.sandbox is None:
            return None
        if self._prints is None:
            return self._config.sandbox.of_run()
        log = self._prints.path
        log.touch()
        return self._config.sandbox.of_run(hidden=log.absolute().parent.parent, log=log)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.close()
        if self._prints is not None:
            self._prints.close()

    def score(self, samples: Sequence[Sample], tolerated: float = math.inf) -> list[Score]:
        """Score every sample, in order. A failed call becomes a `Score` with a failure; nothing is raised for it.

        Several threads may call it; their samples share the workers.

        Args:
            tolerated: once more samples than this have failed, the others fail without being scored.

        Raises:
            UserError: the function does not load in a worker process.
        """
        self._wait_for_start()
        rows = [self._function.arguments(sample) for sample in samples]
        scores: dict[int, Score] = {}
        lost = 0
        left = deque(_Chunk(chunk, broken=0) for chunk in self._chunks(len(rows)))
        waiting: dict[Call[list[Score]], _Chunk] = {}
        while (left or waiting) and lost <= tolerated:
            while left and self._turns.acquire(timeout=0 if waiting else _TURN_S):
                chunk = left.popleft()
                waiting[self._submit(rows, chunk.rows)] = chunk
            for call in self._workers.ended(waiting, _TURN_S if left else _POLL_S):
                chunk = waiting.pop(call)
                finished, again = self._outcome(call, chunk)
                scores.update(zip(chunk.rows, finished, strict=False))
                failed = [row for row, score in zip(chunk.rows, finished, strict=False) if score.failure is not None]
                lost += len(failed)
                self._tell_of_timeouts([(samples[row].sample_id, str(scores[row].failure)) for row in failed])
                broken = chunk.broken + isinstance(call.future.exception(), BrokenProcessPool)
                left.extendleft(_Chunk(part, broken) for part in reversed(again))
        for call in waiting:
            call.future.cancel()
        if self._prints is not None:
            self._prints.look()
        return [scores.get(row, Score(self._config.failure_value, {}, NOT_ASKED)) for row in range(len(rows))]

    def _tell_of_timeouts(self, failed: list[tuple[str, str]]) -> None:
        """Say once, as soon as it happens, that calls take too long: otherwise the batch only seems to hang."""
        late = [f"sample {name} {reason}" for name, reason in failed if reason.startswith(TIMED_OUT)]
        if late and not self._told_of_timeouts:
            self._told_of_timeouts = True
            _logger.warning("reward: %s (reward.timeout_s); every such call keeps a worker busy for as long", late[0])

    def _wait_for_start(self) -> None:
        self._workers.started(f"reward.function '{self._config.function}' loads here", "above, in the error output")

    def _chunks(self, count: int) -> list[range]:
        """Row indices, cut so that workers stay balanced; coroutines and batches gain from being together."""
        together = self._function.is_batch or self._function.is_async
        size = math.ceil(count / (self._count * (1 if together else _CHUNKS_PER_WORKER))) or 1
        if not together:
            size = min(size, _LONGEST_CHUNK)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _submit(self, rows: list[Row], chunk: range) -> Call[list[Score]]:
        self._wait_for_start()  # a pool that was replaced has to load the function as well
        deadline_s = self._config.timeout_s * (1 if len(chunk) == 1 else 2) + GRACE_S
        call = self._workers.call(worker.score_chunk, [rows[index] for index in chunk], deadline_s=deadline_s)
        call.future.add_done_callback(lambda _: self._turns.release())
        return call

    def _outcome(self, call: Call[list[Score]], chunk: _Chunk) -> tuple[list[Score], list[range]]:
        """The scores of the first rows of a chunk, and the chunks to submit for the others."""
        error, rows = call.future.exception(), chunk.rows
        if error is None:
            finished = call.future.result()
            rest = rows[len(finished) :]
            return finished, [rest] if rest else []
        if len(rows) > 1:  # the worker was lost: row by row, only the culprits fail
            return [], [rows[k : k + 1] for k in range(len(rows))]
        # A worker that dies before Pebble knows what it works on breaks the pool, and all that was in it is lost.
        if isinstance(error, BrokenProcessPool) and chunk.broken + 1 < _BROKEN_POOLS:
            return [], [rows]
        overran = f"{TIMED_OUT} {self._config.timeout_s:g} s in code that could not be interrupted; worker killed"
        return [Score(self._config.failure_value, {}, loss(error, "the worker process", overran))], []


def log_failures(scores: Sequence[Score], samples: Sequence[Sample]) -> None:
    """Warnings of the first failed samples, each with its id and the reason, and of how many more there are."""
    log_first("reward failed", _failures(scores, samples), "reward_failure")


def log_first(what: str, failures: Sequence[str], column: str) -> None:
    """Warn of the first failures, and of how many more there are.

    Args:
        failures: a line for each.
        column: of the experience, which holds the reasons of all.
    """
    for line in failures[:_FAILURES_SHOWN]:
        _logger.warning("%s: %s", what, line)
    if more := len(failures[_FAILURES_SHOWN:]):
        _logger.warning("%s: and %d more (column %s)", what, more, column)


def check_failures(scores: Sequence[Score], samples: Sequence[Sample], config: RewardConfig) -> None:
    """Stop when too much of a batch failed.

    Raises:
        UserError: more than `max_failure_share` of the samples failed; it shows the first of them.
        RewardTimeout: likewise, and of none was the reason another than time.
    """
    remedy = (
        "Put the function or the data right, or raise reward.timeout_s or reward.max_failure_share."
        if config.function is not None
        else "Look at the server and what it answers, or raise reward.max_failure_share."
    )
    left, failures = sum(_not_asked(score.failure) for score in scores), _failures(scores, samples)
    late = all(TIMED_OUT in line or NO_REPLY in line for line in failures)
    refuse_too_many(
        failures,
        len(scores),
        config.max_failure_share,
        f"{config.source} failed{' to answer in time' if late else ''} for",
        "samples" + (f", {left} more were not asked any more" if left else ""),
        remedy,
        RewardTimeout if late else UserError,
    )


def refuse_too_many(
    failures: Sequence[str],
    total: int,
    allowed: float,
    begin: str,
    unit: str,
    remedy: str,
    error: type[UserError] = UserError,
) -> None:
    """Stop when more than the share `allowed` of `total` failed.

    Args:
        failures: a line for each.
        begin: what the message says before the numbers, and `unit` what was counted.
        error: what is raised.

    Raises:
        UserError: more did; it shows the first of them.
    """
    if len(failures) <= allowed * total:
        return
    shown = "".join(f"\n    {line}" for line in failures[:_FAILURES_SHOWN])
    more = f"\n    and {len(failures) - _FAILURES_SHOWN} more" if len(failures) > _FAILURES_SHOWN else ""
    raise error(
        f"{begin} {len(failures)} of {total} {unit}; reward.max_failure_share allows {allowed:.0%}:{shown}{more}",
        remedy,
    )


def _failures(scores: Sequence[Score], samples: Sequence[Sample]) -> list[str]:
    return [
        f"sample {sample.sample_id}: {score.failure}"
        for score, sample in zip(scores, samples, strict=True)
        if score.failure is not None and not _not_asked(score.failure)
    ]


def _not_asked(failure: str | None) -> bool:
    """Whether it is no failure of its own, but follows from others' (a server's name may stand before the reason)."""
    return failure is not None and failure.endswith(NOT_ASKED)
