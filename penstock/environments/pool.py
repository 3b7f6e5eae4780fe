"""Worker processes in which episodes live, for a caller that must not wait for them.

An episode stays in the process in which it began, since its state is there: so a pool has one process, and an
episode's name says which. Calls travel in chunks, and a worker hands back what it has after a tenth of a second at the
latest: neither a message per call, nor a long wait behind a slow one. Those of an `async` environment go on meanwhile,
and the worker, which hands back what ends soon after the first of them, is asked again; those of another are answered
in turn, and those it did not come to are sent again.

Left out: what happens inside (penstock/environments/worker.py), how a process that overruns or dies is replaced
(penstock/usercode/workers.py), what an episode is made of (penstock/engines/rollout/episodes.py).
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count
from pathlib import Path

from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments import worker
from penstock.environments.worker import Answered, Call, Reply, Started
from penstock.usercode.sandbox import Sandbox, check_sandbox
from penstock.usercode.workers import GRACE_S, Workers, default_workers, loss
from penstock.usercode.workers import Call as Sent

MOST_WORKERS = 8  # of an engine, where the recipe does not say how many
_LONGEST_CHUNK = 64


class EnvironmentPool:
    """Calls go out at once, replies are fetched: `ask` and `replies`. One thread only.

    Args:
        config: the section `environment`.
        run: the run folder, which a sandbox hides.

    Attributes:
        stop: the texts that end a turn.
        has_tools: whether the environment is played by tools.
        is_agent: whether it asks the policy, instead of answering it.

    Raises:
        UserError: the class does not load in a worker process, or this machine has no sandbox for it.
    """

    def __init__(self, config: EnvironmentConfig, run: Path | None = None) -> None:
        if config.sandbox is not None:
            check_sandbox("environment.sandbox")
        sandbox = None if config.sandbox is None else config.sandbox.of_run(hidden=run)
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._workers = [
            _Worker(config, sandbox) for _ in range(config.workers or default_workers(cores, MOST_WORKERS))
        ]
        self._kept: dict[str, Reply] = {}  # that have come, and that nobody has asked for
        started = [item.started() for item in self._workers][0]  # asked of all, so that all have started
        self.stop, self.has_tools, self.is_agent = started.stop, started.has_tools, started.is_agent

    @property
    def awaited(self) -> int:
        """Calls that were asked and whose replies have not come, less those of abandoned episodes."""
        return sum(item.awaited for item in self._workers)

    def ask(self, calls: Sequence[Call]) -> None:
        """Send calls to the workers of their episodes, at most one call of an episode at a time."""
        for call in calls:
            self._worker_of(call.episode).queue.append(call)
        for item in self._workers:
            item.send()

    def replies(self, wait_for: int = 0, of: Collection[str] | None = None) -> dict[str, Reply]:
        """Return replies that have come, by episode: at least `wait_for` of them, or as many as are awaited.

        Args:
            of: the episodes whose replies are asked for; those of others stay here. None: all.
        """
        found: dict[str, Reply] = {}
        while True:
            for item in self._workers:
                self._kept |= item.collect()
            found |= {name: self._kept.pop(name) for name in [*self._kept] if of is None or name in of}
            if len(found) >= wait_for or not self.awaited:
                return found
            flying = [item.sent.future for item in self._workers if item.sent is not None]
            wait(flying, timeout=1.0, return_when=FIRST_COMPLETED)

    def abandon(self, episodes: Collection[str]) -> None:
        """Drop episodes, whatever they are doing; others are not touched. Returns at once.

        Afterwards `replies` returns no reply of theirs and `awaited` does not count their calls. What waits in the
        queue is not sent any more. What is under way is cancelled where the environment is `async`: its coroutine gets
        `asyncio.CancelledError` where it waits. Of another environment the call ends by itself, at `timeout_s` at the
        latest, and holds its worker up until then. A name that was abandoned may begin a new episode at once.

        Args:
            episodes: their names; those of episodes that are over, or never began, change nothing.
        """
        for name in episodes:
            self._kept.pop(name, None)
        for item in self._workers:
            if names := [name for name in episodes if self._worker_of(name) is item]:
                item.abandon(names)

    def close(self) -> None:
        """End the worker processes."""
        for item in self._workers:
            item.close()

    def _worker_of(self, episode: str) -> _Worker:
        return self._workers[zlib.crc32(episode.encode()) % len(self._workers)]


class Asking:
    """What one generation asks the environments of a pool, a step's calls together.

    Args:
        in_step: wait for all answers, so that they come in the same step whenever a generation is repeated.

    Attributes:
        unanswered: names of the episodes that were asked and have not answered.
        waited_seconds: with nothing else to do.
    """

    def __init__(self, pool: EnvironmentPool, in_step: bool) -> None:
        self._pool, self._in_step = pool, in_step
        self._calls: list[Call] = []
        self.unanswered: set[str] = set()
        self.waited_seconds = 0.0

    def ask(self, call: Call) -> None:
        """Put a call to those that `send` sends."""
        self._calls.append(call)
        self.unanswered.add(call.episode)

    def send(self) -> None:
        """Send all calls of a step together."""
        calls, self._calls = self._calls, []
        self._pool.ask(calls)

    def hear(self, busy: bool) -> dict[str, Reply]:
        """Send what is left to send; return what has been answered, by the episodes' names.

        Args:
            busy: whether there is something else to do than to wait for an answer.
        """
        self.send()
        wait_for = len(self.unanswered) if self._in_step else 0 if busy else min(1, len(self.unanswered))
        begin = time.perf_counter()
        replies = self._pool.replies(wait_for, of=self.unanswered)
        self.waited_seconds += time.perf_counter() - begin
        self.unanswered -= replies.keys()
        return replies


class _Worker:
    """One process with a queue of calls, and at most one message under way, for which a reply is due soon."""

    def __init__(self, config: EnvironmentConfig, sandbox: Sandbox | None) -> None:
        self._config = config
        self.queue: deque[Call] = deque()
        self.sent: Sent[Answered] | None = None
        self._numbers = count()
        self._open: dict[int, Call] = {}  # that the worker has and has not answered, in the order of their numbers
        self._deadline_s = config.timeout_s + worker.HAND_BACK_S + GRACE_S
        self._workers = Workers(1, worker.start, (config.model_dump(),), worker.started, sandbox)

    def started(self) -> Started:
        loads = f"environment.type '{self._config.type}' loads in the flow"
        self._started = self._workers.started(loads, "in the rank's log")
        return self._started

    @property
    def awaited(self) -> int:
        return len(self.queue) + len(self._open)

    def send(self) -> None:
        """Send the next chunk, or ask after calls that go on, unless a message is under way."""
        if self.sent is not None or not self.awaited:
            return
        most = len(self.queue) if self._started.is_async else _LONGEST_CHUNK
        chunk = {next(self._numbers): self.queue.popleft() for _ in range(min(most, len(self.queue)))}
        self._open |= chunk
        self.sent = self._workers.call(worker.answer, chunk, deadline_s=self._deadline_s)

    def collect(self) -> dict[str, Reply]:
        """Return what the message under way brought if it has ended, and send the next."""
        if self.sent is None or not self._workers.ended([self.sent], 0):
            return {}
        replies = self._outcome(self.sent.future)
        self.sent = None
        found = {self._open.pop(number).episode: reply for number, reply in replies.items() if number in self._open}
        if not self._started.is_async:  # it did not come to them
            self.queue.extendleft(reversed(self._open.values()))
            self._open.clear()
        self.send()
        return found

    def _outcome(self, future: Future[Answered]) -> dict[int, Reply]:
        """Return replies by the numbers of their calls; a lost worker is the reply to all that it had."""
        error = future.exception()
        if error is not None:
            limit = self._config.timeout_s
            overran = f"its worker was killed: a call took over {limit:g} s, in code that could not be interrupted"
            return self._failed(self._open, loss(error, "its worker process", overran))
        answered = future.result()
        if not self._started.is_async:
            return answered.replies
        unknown = self._open.keys() - answered.replies.keys() - {*answered.under_way}  # to the process that answers now
        return answered.replies | self._failed(unknown, "its worker process died")

    def _failed(self, numbers: Iterable[int], failure: str) -> dict[int, Reply]:
        return {number: Reply(failure=failure) for number in numbers}

    def abandon(self, episodes: list[str]) -> None:
        """Drop episodes. The process hears of it before what is sent later."""
        gone = {*episodes}
        self.queue = deque(call for call in self.queue if call.episode not in gone)
        self._open = {number: call for number, call in self._open.items() if call.episode not in gone}
        self._workers.call(worker.drop, episodes, deadline_s=self._deadline_s)

    def close(self) -> None:
        self._workers.close()
