"""Worker processes in which episodes live, for a caller that must not wait for them.

An episode stays in the process in which it began, since its state is there: so each worker is a pool of one process,
and an episode's name says which. Pebble ends a process whose call overruns, and starts another. Calls travel in
chunks, and a worker hands back what it has after a tenth of a second: neither a message per call, nor a long wait
behind a slow one.

What an environment starts ends with its worker (penstock/usercode/kept.py). Left out: what happens inside
(penstock/environments/worker.py), what an episode is made of (engines/rollout/episodes.py).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessPool

from configs.sections.rollout import EnvironmentConfig
from penstock.base.errors import UserError
from penstock.environments import worker
from penstock.environments.worker import Call, Reply
from penstock.usercode.kept import Kept

_START_TIMEOUT_S = 300.0  # importing the user's module may import a framework from a cold disk
_GRACE_S = 1.0  # beyond the deadline inside the worker, before it is killed
_LONGEST_CHUNK = 64


class EnvironmentPool:
    """Calls go out at once, replies are fetched: `ask` and `replies`. One thread only.

    Args:
        config: the section `environment`.

    Attributes:
        stop: the texts that end a turn.

    Raises:
        UserError: the class does not load in a worker process.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._workers = [_Worker(config) for _ in range(config.workers)]
        self.stop = [item.stop() for item in self._workers][0]  # of all, so that all have started

    def ask(self, calls: Sequence[Call]) -> None:
        """Send calls to the workers of their episodes; of an episode one at a time."""
        for call in calls:
            self._workers[zlib.crc32(call.episode.encode()) % len(self._workers)].queue.append(call)
        for item in self._workers:
            item.send()

    def replies(self, wait_for: int = 0) -> dict[str, Reply]:
        """Return replies that have come, by episode: at least `wait_for` of them, or as many as were asked for."""
        found: dict[str, Reply] = {}
        while True:
            for item in self._workers:
                found |= item.collect()
            flying = [item.future for item in self._workers if item.future is not None]
            if len(found) >= wait_for or not flying:
                return found
            wait(flying, timeout=1.0, return_when=FIRST_COMPLETED)

    def forget(self) -> None:
        """Drop all episodes. No call may be under way."""
        for item in self._workers:
            item.forget()

    def close(self) -> None:
        """End the worker processes."""
        for item in self._workers:
            item.close()


class _Worker:
    """One process with a queue of calls, of which one chunk is under way."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self.queue: deque[Call] = deque()
        self.future: Future[list[Reply]] | None = None
        self._chunk: list[Call] = []
        self._start()

    def _start(self) -> None:
        self._pool = ProcessPool(
            max_workers=1,
            initializer=worker.start,
            initargs=(self._config.model_dump(),),
            context=Kept(),
        )
        self._ready: Future[tuple[str, ...]] = self._pool.schedule(worker.stop)

    def stop(self) -> tuple[str, ...]:
        try:
            return self._ready.result(_START_TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError) as error:
            raise UserError(
                f"environment.type '{self._config.type}' loads in the flow but not in a worker process.",
                "The worker's traceback stands in the rank's log.",
            ) from error

    def send(self) -> None:
        """Send the next chunk, unless one is under way."""
        if self.future is not None or not self.queue:
            return
        if not self._pool.active:
            self._restart()
        self._chunk = [self.queue.popleft() for _ in range(min(_LONGEST_CHUNK, len(self.queue)))]
        deadline = self._config.timeout_s + worker.HAND_BACK_S + _GRACE_S
        self.future = self._pool.schedule(worker.answer, args=(self._chunk,), timeout=deadline)

    def collect(self) -> dict[str, Reply]:
        """Return the replies of the chunk under way if it has ended, and send the next."""
        if self.future is None:
            return {}
        if not self._pool.active and not self.future.done():
            self.future.set_exception(BrokenProcessPool())
        if not self.future.done():
            return {}
        replies, chunk = self._outcome(self.future), self._chunk
        self.future = None
        self.queue.extendleft(reversed(chunk[len(replies) :]))
        self.send()
        return {call.episode: reply for call, reply in zip(chunk, replies, strict=False)}

    def _outcome(self, future: Future[list[Reply]]) -> list[Reply]:
        error = future.exception()
        if error is None:
            return future.result()
        return [Reply(failure=self._reason(error))] * len(self._chunk)

    def _reason(self, error: BaseException) -> str:
        limit = self._config.timeout_s
        if isinstance(error, TimeoutError):
            return f"its worker was killed: a call took over {limit:g} s, in code that could not be interrupted"
        if isinstance(error, ProcessExpired):
            return f"its worker process died (exit code {error.exitcode})"
        if isinstance(error, BrokenProcessPool):  # so soon that Pebble had not yet heard what it was working on
            return "its worker process died"
        return f"{type(error).__name__}: {error}"

    def forget(self) -> None:
        if self._pool.active:
            self._pool.schedule(worker.forget)

    def _restart(self) -> None:
        """Replace the pool: a worker that dies while idle (out of memory, say) breaks Pebble's for good."""
        self._pool.join()
        self._start()

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()
