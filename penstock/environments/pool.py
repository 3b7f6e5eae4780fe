"""Worker processes in which episodes live, for a caller that must not wait for them.

An episode stays in the process in which it began, since its state is there: so a pool has one process, and an
episode's name says which. Calls travel in chunks, and a worker hands back what it has after a tenth of a second:
neither a message per call, nor a long wait behind a slow one.

Left out: what happens inside (penstock/environments/worker.py), how a process that overruns or dies is replaced
(penstock/usercode/workers.py), what an episode is made of (engines/rollout/episodes.py).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from configs.sections.rollout import EnvironmentConfig
from penstock.environments import worker
from penstock.environments.worker import Call, Reply
from penstock.usercode.workers import GRACE_S, Workers, loss
from penstock.usercode.workers import Call as Sent

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
        self.stop = [item.stop() for item in self._workers][0]  # asked of all workers, so that all have started

    def ask(self, calls: Sequence[Call]) -> None:
        """Send calls to the workers of their episodes, at most one call of an episode at a time."""
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
            flying = [item.sent.future for item in self._workers if item.sent is not None]
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
        self.sent: Sent[list[Reply]] | None = None
        self._chunk: list[Call] = []
        self._workers = Workers(1, worker.start, (config.model_dump(),), worker.stop)

    def stop(self) -> tuple[str, ...]:
        loads = f"environment.type '{self._config.type}' loads in the flow"
        return self._workers.started(loads, "in the rank's log")

    def send(self) -> None:
        """Send the next chunk, unless one is under way."""
        if self.sent is not None or not self.queue:
            return
        self._chunk = [self.queue.popleft() for _ in range(min(_LONGEST_CHUNK, len(self.queue)))]
        deadline_s = self._config.timeout_s + worker.HAND_BACK_S + GRACE_S
        self.sent = self._workers.call(worker.answer, self._chunk, deadline_s=deadline_s)

    def collect(self) -> dict[str, Reply]:
        """Return the replies of the chunk under way if it has ended, and send the next."""
        if self.sent is None or not self._workers.ended([self.sent], 0):
            return {}
        replies, chunk = self._outcome(self.sent.future), self._chunk
        self.sent = None
        self.queue.extendleft(reversed(chunk[len(replies) :]))
        self.send()
        return {call.episode: reply for call, reply in zip(chunk, replies, strict=False)}

    def _outcome(self, future: Future[list[Reply]]) -> list[Reply]:
        error = future.exception()
        if error is None:
            return future.result()
        limit = self._config.timeout_s
        overran = f"its worker was killed: a call took over {limit:g} s, in code that could not be interrupted"
        return [Reply(failure=loss(error, "its worker process", overran))] * len(self._chunk)

    def forget(self) -> None:
        self._workers.call(worker.forget)

    def close(self) -> None:
        self._workers.close()
