"""Elastic groups: engines that come and go while a training runs.

    machine there -> ranks started -> model loaded -> (next reshard) member -> lost -> machine there -> ...

Each has a thread that brings it, so nobody waits for a pool that has no machine free. One that is ready joins at the
next reshard, with whose weights it begins. A member that is lost is left out at once, and brought again, unless its run
in Prefect was cancelled: so one takes a machine away for good.

Left out: what becomes of the prompts that a lost group has begun (penstock/session/rollout/generation.py), how groups
meet (penstock/tasks/iteration/reshard.py), how a pool's machine is had (penstock/session/machines/hosts.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

import httpx

from penstock.base.errors import UserError
from penstock.engines.groups.group import EngineError, EngineGroup, RankLost
from penstock.engines.groups.hosts import HostFailed
from penstock.engines.groups.spec import GroupSpec
from penstock.session.machines.hosts import Dismissed, Machines, Stopped

Item = TypeVar("Item")

LOOK_S, AGAIN_S = 0.5, 2.0
ANSWER_S = 2.0  # an echo takes milliseconds


@dataclass(frozen=True)
class Joined:
    """A group that gets prompts from now on."""

    group: str


@dataclass(frozen=True)
class Gone:
    """A group that was lost, or could not be had, and why; `for_good` whether nobody tries again."""

    group: str
    reason: str
    for_good: bool


class ElasticGroups:
    """The elastic groups of a training, which are brought as long as the `with` block lasts.

    Args:
        build: loads the models of a group that has started.
        restarts: how often each may be lost, or fail to start, within `window_s`; after that it stays away.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        machines: Machines,
        build: Callable[[EngineGroup], object],
        restarts: int,
        window_s: float,
    ) -> None:
        self._machines, self._build = machines, build
        self._restarts, self._window_s = restarts, window_s
        self._ready: queue.SimpleQueue[EngineGroup] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Joined | Gone] = queue.SimpleQueue()
        self._closing, self._changes = threading.Event(), threading.Lock()
        self._started: set[EngineGroup] = set()
        self._ended: set[EngineGroup] = set()  # by this training, not lost
        self._silent: set[EngineGroup] = set()
        self._members: list[EngineGroup] = []
        self._model_is_there = threading.Event()
        self._threads = [
            threading.Thread(target=copy_context().run, args=(self._bring_again, spec), name=spec.name, daemon=True)
            for spec in specs
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self.end_all()
        self._model_is_there.set()
        for thread in self._threads:
            thread.join()

    @property
    def members(self) -> list[EngineGroup]:
        """Those whose engines get prompts."""
        with self._changes:
            return list(self._members)

    def model_is_there(self) -> None:
        """Let groups that have started load the model, from now on."""
        self._model_is_there.set()

    def ready(self) -> list[EngineGroup]:
        """Return the groups that can join; each once."""
        return [group for group in _taken(self._ready) if self._answers(group)]

    def leave_out_silent(self) -> None:
        """Let members be none that are not heard now: what all members do together would wait for them."""
        for group in self.members:
            self._answers(group)

    def _answers(self, group: EngineGroup) -> bool:
        try:
            if group.answers(ANSWER_S):
                return True
            self._silent.add(group)
        except RuntimeError:  # it is lost, or was ended: its thread knows why
            pass
        self.leave(group)
        return False

    def join(self, groups: Sequence[EngineGroup]) -> None:
        """Let groups that have the newest weights be members."""
        with self._changes:
            self._members += groups
        for group in groups:
            self._news.put(Joined(group.spec.name))

    def leave(self, group: EngineGroup) -> None:
        """Let a group that is lost be no member any more."""
        with self._changes:
            self._members = [member for member in self._members if member is not group]

    def news(self) -> list[Joined | Gone]:
        """Return which groups have joined and gone since this was last asked."""
        return _taken(self._news)

    def end_all(self) -> None:
        """End all that have started; they are brought again, unless the training is over."""
        with self._changes:
            self._ended |= (started := set(self._started))
            self._members = []
        for group in started:
            group.close(grace_s=0.0)

    def _bring_again(self, spec: GroupSpec) -> None:
        """Bring a group as often as it may be lost; returns with the training, or when the group stays away."""
        lost_at: list[float] = []
        for epoch in count():
            gone = self._had(spec, epoch)
            if self._closing.is_set():
                return
            if gone is None:
                continue  # ended to begin anew
            now = time.monotonic()
            lost_at = [at for at in lost_at if now - at <= self._window_s] + [now]
            gone = replace(gone, for_good=gone.for_good or len(lost_at) > self._restarts)
            self._news.put(gone)
            if gone.for_good:
                return

    def _had(self, spec: GroupSpec, epoch: int) -> Gone | None:
        """Bring a group, have it until it is gone, and return why it is; None where it was ended."""
        why = None
        try:
            with self._machines.lent(spec, self._closing):
                why = self._live(EngineGroup(spec, self._machines.hosts, epoch))
        except Stopped:
            return None
        except (RankLost, HostFailed) as loss:
            return Gone(spec.name, loss.reason, for_good=False)
        except httpx.HTTPError:  # Prefect's server is busy, or away: it is asked again
            self._closing.wait(AGAIN_S)
        except (Dismissed, UserError, EngineError) as error:  # which would come again
            return Gone(spec.name, str(error), for_good=True)
        return None if why is None else Gone(spec.name, why, for_good=False)

    def _live(self, group: EngineGroup) -> str | None:
        """Let a group load the model and be ready, until it is lost; return why it was, None where it was ended.

        Raises:
            EngineError, RankLost, UserError: it could not start.
        """
        with self._changes:
            self._started.add(group)
            if self._closing.is_set():
                self._ended.add(group)
        try:
            if group in self._ended:
                return None
            group.wait_ready()
            self._model_is_there.wait()
            self._build(group)
            self._ready.put(group)
            while (loss := self._loss(group)) is None:
                self._closing.wait(LOOK_S)
            return loss
        except RuntimeError:
            if group not in self._ended:
                raise
            return None
        finally:
            self.leave(group)
            with self._changes:
                self._started.remove(group)
            group.close(grace_s=0.0)

    def _loss(self, group: EngineGroup) -> str | None:
        """Return why a group is lost; None: it is not. Raises RuntimeError if it was ended."""
        if group in self._silent:
            return f"it did not answer within {ANSWER_S:g} s at a reshard"
        loss = group.loss()
        return None if loss is None else loss.reason


def _taken(waiting: queue.SimpleQueue[Item]) -> list[Item]:
    """Take all that is in a queue, which one thread alone takes from."""
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found
