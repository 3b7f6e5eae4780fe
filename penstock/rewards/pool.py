"""Scoring a batch of responses with the user's reward function, in worker processes that can be lost.

Why processes: a reward function is untrusted in its running time and its stability. It may loop, crash or hang in C,
and neither the training nor the rewards of the other samples may suffer. Pebble's pool ends a process whose task
overruns and starts another; what is added here is the cutting into chunks, and finding the row that was to blame.

What a function starts ends with its worker (penstock/usercode/kept.py). Workers are spawned, so a script that trains
needs the usual `if __name__ == "__main__":`. Left out: reward models, which are engines, and what servers give
(penstock/rewards/source.py).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from pebble import ProcessExpired, ProcessPool

from penstock.base.errors import UserError
from penstock.rewards import worker
from penstock.rewards.function import load_reward_function
from penstock.rewards.server import NOT_ASKED
from penstock.rewards.types import TIMED_OUT, Row, Sample, Score
from penstock.usercode.kept import Kept
from penstock.usercode.prints import PrintLog

if TYPE_CHECKING:
    from configs.sections.reward import RewardConfig


__all__ = ["RewardPool", "Sample", "Score", "check_failures", "log_first", "log_failures", "refuse_too_many"]

_logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 300.0  # importing the user's module may import a framework from a cold disk

_GRACE_S = 1.0  # beyond the deadlines inside the worker, before it is killed

_POLL_S = 1.0

_TURN_S = 0.05  # until a call looks again whether another has left a turn

_CHUNKS_PER_WORKER = 4

_LONGEST_CHUNK = 64

_FAILURES_SHOWN = 3

_TURNS_PER_WORKER = 2  # chunks with the workers at a time: none waits for the next

_CALLS_AHEAD = 8  # so that a slow response delays few others

_BROKEN_POOLS = 3  # that a row is given to before it counts as the one that breaks them


class _Chunk(NamedTuple):
    rows: range
    pool: ProcessPool  # that was given these rows
    broken: int  # pools that broke while they had them


class RewardPool:
    """Worker processes that score samples; a context manager that lives for a whole training.

    Entering returns at once, while the workers start; the first `score` waits for them.

    Args:
        config: the reward section, with a function.
        columns: names of the columns that the data rows have.
        log: file for what the function prints; None: the workers' standard error.

    Raises:
        UserError: the function cannot be loaded or called with these columns.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str], log: Path | None = None) -> None:
        if config.function is None:
            raise ValueError("a RewardPool needs reward.function")
        self._config = config
        self._columns = list(columns)
        self._workers = config.workers or default_workers(len(os.sched_getaffinity(0)))
        self._function = load_reward_function(config.function, config.settings, columns)
        self._prints = None if log is None else PrintLog(log, f"reward.function '{config.function}'")
        # Pebble hands workers whatever is scheduled, and to cancel what one of them has costs a new process.
        self._turns = threading.Semaphore(_TURNS_PER_WORKER * self._workers)
        self._restarting, self._closing = threading.Lock(), threading.Lock()
        self._closed = self._told_of_timeouts = False
        self.calls_ahead = 0 if self._function.is_batch else _CALLS_AHEAD

    def __enter__(self) -> Self:
        # One thread starts workers, and waits for them where the caller does not.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-pool")
        self._pool, self._ready = self._new_pool(), Future[None]()
        self._starting = self._thread.submit(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:  # workers may still be starting: they are not waited for
            self._closed = True
            self._pool.stop()
            self._ready.cancel()
        self._thread.shutdown()
        self._pool.join()
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
        self._starting.result()
        rows = [self._function.arguments(sample) for sample in samples]
        scores: dict[int, Score] = {}
        lost = 0
        left = deque((chunk, 0) for chunk in self._chunks(len(rows)))
        waiting: dict[Future[list[Score]], _Chunk] = {}
        while (left or waiting) and lost <= tolerated:
            while left and self._turns.acquire(timeout=0 if waiting else _TURN_S):
                future, chunk = self._submit(rows, *left.popleft())
                waiting[future] = chunk
            for future in self._ended(waiting, _TURN_S if left else _POLL_S):
                chunk = waiting.pop(future)
                finished, again = self._outcome(future, chunk)
                scores.update(zip(chunk.rows, finished, strict=False))
                failed = [row for row, score in zip(chunk.rows, finished, strict=False) if score.failure is not None]
                lost += len(failed)
                self._tell_of_timeouts([(samples[row].sample_id, str(scores[row].failure)) for row in failed])
                broken = chunk.broken + isinstance(future.exception(), BrokenProcessPool)
                left.extendleft((part, broken) for part in reversed(again))
        for future in waiting:
            future.cancel()
        if self._prints is not None:
            self._prints.look()
        return [scores.get(row, Score(self._config.failure_value, {}, NOT_ASKED)) for row in range(len(rows))]

    def _ended(self, waiting: dict[Future[list[Score]], _Chunk], patience_s: float) -> set[Future[list[Score]]]:
        """Wait for a while, and return the chunks that have ended."""
        done, _ = wait(waiting, timeout=patience_s, return_when=FIRST_COMPLETED)
        pool = self._living_pool()
        for future in waiting.keys() - done:
            if waiting[future].pool is not pool and not future.done():  # it broke before it took this on
                future.set_exception(BrokenProcessPool())
        return done

    def _tell_of_timeouts(self, failed: list[tuple[str, str]]) -> None:
        """Say once, as soon as it happens, that calls take too long: otherwise the batch only seems to hang."""
        late = [f"sample {name} {reason}" for name, reason in failed if reason.startswith(TIMED_OUT)]
        if late and not self._told_of_timeouts:
            self._told_of_timeouts = True
            _logger.warning("reward: %s (reward.timeout_s); every such call keeps a worker busy for as long", late[0])

    def _new_pool(self) -> ProcessPool:
        """Return a pool whose processes start with its first task."""
        config, log = self._config, None if self._prints is None else str(self._prints.path)
        return ProcessPool(
            max_workers=self._workers,
            initializer=worker.start,
            initargs=(config.function, config.settings, self._columns, config.timeout_s, config.failure_value, log),
            context=Kept(),
        )

    def _start(self) -> None:
        with self._closing:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._ready = self._pool.schedule(worker.ready)
        try:
            self._ready.result(_START_TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError) as error:
            raise UserError(
                f"reward.function '{self._config.function}' loads here but not in a worker process.",
                "The worker's traceback stands above, in the error output.",
            ) from error

    def _living_pool(self) -> ProcessPool:
        """Return the pool, a new one if a worker died while it was idle (out of memory, say): Pebble's is broken then.

        Raises:
            RuntimeError: it was closed.
        """
        with self._restarting:
            if not self._pool.active:
                self._thread.submit(self._restart).result()
            return self._pool

    def _restart(self) -> None:
        self._pool.join()
        self._pool = self._new_pool()
        self._start()

    def _chunks(self, count: int) -> list[range]:
        """Row indices, cut so that workers stay balanced; coroutines and batches gain from being together."""
        together = self._function.is_batch or self._function.is_async
        size = math.ceil(count / (self._workers * (1 if together else _CHUNKS_PER_WORKER))) or 1
        if not together:
            size = min(size, _LONGEST_CHUNK)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _submit(self, rows: list[Row], chunk: range, broken: int = 0) -> tuple[Future[list[Score]], _Chunk]:
        deadline, pool = self._config.timeout_s * (1 if len(chunk) == 1 else 2) + _GRACE_S, self._living_pool()
        future = pool.schedule(worker.score_chunk, args=([rows[index] for index in chunk],), timeout=deadline)
        future.add_done_callback(lambda _: self._turns.release())
        return future, _Chunk(chunk, pool, broken)

    def _outcome(self, future: Future[list[Score]], chunk: _Chunk) -> tuple[list[Score], list[range]]:
        """The scores of the first rows of a chunk, and the chunks to submit for the others."""
        error, rows = future.exception(), chunk.rows
        if error is None:
            finished = future.result()
            rest = rows[len(finished) :]
            return finished, [rest] if rest else []
        if len(rows) > 1:  # the worker was lost: row by row, only the culprits fail
            return [], [rows[k : k + 1] for k in range(len(rows))]
        # A worker that dies before Pebble knows what it works on breaks the pool, and all that was in it is lost.
        if isinstance(error, BrokenProcessPool) and chunk.broken + 1 < _BROKEN_POOLS:
            return [], [rows]
        return [Score(self._config.failure_value, {}, self._reason(error))], []

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"{TIMED_OUT} {self._config.timeout_s:g} s in code that could not be interrupted; worker killed"
        if isinstance(error, ProcessExpired):
            return f"the worker process died (exit code {error.exitcode})"
        if isinstance(error, BrokenProcessPool):
            return "the worker process died"
        return f"{type(error).__name__}: {error}"


def default_workers(cores: int) -> int:
    """Return how many processes score where the recipe does not say: half of the cores, engines need the others."""
    return min(32, max(2, cores // 2))


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
    """
    remedy = (
        "Put the function or the data right, or raise reward.timeout_s or reward.max_failure_share."
        if config.function is not None
        else "Look at the server and what it answers, or raise reward.max_failure_share."
    )
    left = sum(_not_asked(score.failure) for score in scores)
    refuse_too_many(
        _failures(scores, samples),
        len(scores),
        config.max_failure_share,
        f"{config.source} failed for",
        "samples" + (f", {left} more were not asked any more" if left else ""),
        remedy,
    )


def refuse_too_many(failures: Sequence[str], total: int, allowed: float, begin: str, unit: str, remedy: str) -> None:
    """Stop when more than the share `allowed` of `total` failed.

    Args:
        failures: a line for each.
        begin: what the message says before the numbers, and `unit` what was counted.

    Raises:
        UserError: more did; it shows the first of them.
    """
    if len(failures) <= allowed * total:
        return
    shown = "".join(f"\n    {line}" for line in failures[:_FAILURES_SHOWN])
    more = f"\n    and {len(failures) - _FAILURES_SHOWN} more" if len(failures) > _FAILURES_SHOWN else ""
    raise UserError(
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
