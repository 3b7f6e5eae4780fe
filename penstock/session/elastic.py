"""Elastic groups: engines that come and go while a training runs.

    machine there -> ranks started -> model loaded -> (next reshard) member -> lost -> machine there -> ...

Each has a thread that brings it, so nobody waits for a pool that has no machine free. One that is ready joins at the
next reshard, with whose weights it begins. A member that is lost is left out at once, and brought again, unless its run
in Prefect was cancelled: so one takes a machine away for good.

Left out: what becomes of the prompts that a lost group has begun (penstock/session/rollout/generation.py), how groups
meet (tasks/iteration/reshard.py), how a pool's machine is had (penstock/session/hosts.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from engines.groups.group import EngineError, EngineGroup, RankLost
from engines.groups.hosts import HostFailed
from engines.groups.spec import GroupSpec
from penstock.base.errors import UserError
from penstock.session.hosts import Dismissed, Machines, Stopped

LOOK_S = 0.5


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
    """The elastic groups of a training, from `begin` until the end of the `with` block.

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
        self._specs, self._machines, self._build = specs, machines, build
        self._restarts, self._window_s = restarts, window_s
        self._ready: queue.SimpleQueue[EngineGroup] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Joined | Gone] = queue.SimpleQueue()
        self._closing, self._changes = threading.Event(), threading.Lock()
        self._alive: dict[str, EngineGroup] = {}  # started, by name
        self._members: list[EngineGroup] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self.end_all()
        for thread in self._threads:
            thread.join()

    @property
    def members(self) -> list[EngineGroup]:
        """Those whose engines get prompts."""
        with self._changes:
            return list(self._members)

    def begin(self) -> None:
        """Begin to bring all of them, once the model is there that they load. A second call does nothing."""
        if self._threads:
            return
        self._threads = [
            threading.Thread(target=copy_context().run, args=(self._bring_again, spec), name=spec.name, daemon=True)
            for spec in self._specs
        ]
        for thread in self._threads:
            thread.start()

    def ready(self) -> list[EngineGroup]:
        """Return the groups that can join; each once."""
        found = []
        while not self._ready.empty():
            found.append(self._ready.get())
        return [group for group in found if _loss(group) is None]

    def join(self, groups: Sequence[EngineGroup]) -> None:
        """Let groups that have the newest weights be members."""
        with self._changes:
            self._members += groups
        for group in groups:
            self._news.put(Joined(group.spec.name))

    def leave(self, group: EngineGroup) -> None:
        """Let a lost group be no member any more."""
        with self._changes:
            self._members = [member for member in self._members if member is not group]

    def news(self) -> list[Joined | Gone]:
        """Return which groups have joined and gone since this was last asked."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def end_all(self) -> None:
        """End all that have started; they are brought again, unless the training is over."""
        with self._changes:
            alive, self._members = list(self._alive.values()), []
        for group in alive:
            group.close(grace_s=0.0)

    def _bring_again(self, spec: GroupSpec) -> None:
        """Bring a group as often as it may be lost; ends with the training, or when the group stays away."""
        failed_at: list[float] = []
        epoch = 0
        while not self._closing.is_set():
            why, for_good = self._bring(spec, epoch)
            if self._closing.is_set():
                return
            epoch += 1
            if why is None:
                continue
            now = time.monotonic()
            failed_at = [at for at in failed_at if now - at <= self._window_s] + [now]
            for_good = for_good or len(failed_at) > self._restarts
            self._news.put(Gone(spec.name, why, for_good))
            if for_good:
                return

    def _bring(self, spec: GroupSpec, epoch: int) -> tuple[str | None, bool]:
        """Have a group until it is lost; return why it is, None where it was ended, and whether it stays away."""
        try:
            with self._machines.lent(spec, self._closing):
                group = EngineGroup(spec, self._machines.hosts, epoch)
                with self._changes:
                    self._alive[spec.name] = group
                try:
                    if self._closing.is_set():
                        return None, True
                    group.wait_ready()
                    self._build(group)
                    self._ready.put(group)
                    return self._await_loss(group), False
                finally:
                    self.leave(group)
                    with self._changes:
                        del self._alive[spec.name]
                    group.close(grace_s=0.0)
        except Stopped:
            return None, True
        except Dismissed as dismissed:
            return str(dismissed), True
        except (RankLost, HostFailed) as loss:
            return loss.reason, False
        except (UserError, EngineError) as error:
            return str(error), True
        except RuntimeError:  # ended meanwhile, with the training or to begin anew
            return None, False

    def _await_loss(self, group: EngineGroup) -> str | None:
        while not self._closing.wait(LOOK_S):
            if (loss := _loss(group)) is not None:
                return loss
        return None


def _loss(group: EngineGroup) -> str | None:
    """Return why a group is lost; None: it is not.

    Raises:
        RuntimeError: it was ended.
    """
    loss = group.loss()
    return None if loss is None else loss.reason
