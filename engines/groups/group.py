"""An engine group, seen from the flow: rank processes that take one command at a time, all of them or none.

`call` sends a command to every rank and reads until every rank has replied. While it reads it also watches the
processes and asks each once a second for an echo, which needs no Python there (channel.py), so a dead, stuck or silent
rank is named within its deadline. A call that does not return normally kills the whole group: after half a command the
ranks' collectives are out of step, and a group that cannot be trusted is worth less than a restart from the manifest.

Time is counted only while a call reads, and at most one second per look. Hence a flow that was idle, stopped or
starved does not blame its ranks.

Left out: restarting (the flow's recovery makes a new group with the next epoch) and what commands mean.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from engines.groups import channel, launch
from engines.groups.launch import START_KEY, GroupSpec, RankDevice
from penstock.base.errors import UserError

__all__ = ["EngineError", "EngineGroup", "GroupSpec", "RankDevice", "RankLost"]

TICK_S = 0.2  # an exited process is noticed this fast
COUNTED_PER_LOOK_S = 1.0
HEARTBEAT_S = 1.0
_HEARTBEAT = channel.pack({"kind": "heartbeat"})
ERROR_GRACE_S = 5.0  # after one rank's error the others get this long to report theirs


class EngineError(RuntimeError):
    """A rank's handler raised. The group has been ended."""

    def __init__(self, group: str, rank: int, command: str, remote_traceback: str, log_file: Path) -> None:
        super().__init__(group, rank, command, remote_traceback, log_file)
        self.group, self.rank, self.command = group, rank, command
        self.remote_traceback, self.log_file = remote_traceback, log_file

    def __str__(self) -> str:
        return (
            f"group {self.group!r}, rank {self.rank}: {self.command!r} raised\n{self.remote_traceback}"
            f"(log: {self.log_file})"
        )


class RankLost(RuntimeError):
    """A rank exited, fell silent or missed a deadline. The group has been ended.

    `log_tail` is the end of the rank's log; `stacks` are those of all ranks, where a process was still there to ask.
    """

    def __init__(
        self, group: str, rank: int, reason: str, log_file: Path, log_tail: str = "", stacks: str = ""
    ) -> None:
        super().__init__(group, rank, reason, log_file, log_tail, stacks)
        self.group, self.rank, self.reason, self.log_file = group, rank, reason, log_file
        self.log_tail, self.stacks = log_tail, stacks

    def __str__(self) -> str:
        lines = [f"group {self.group!r}, rank {self.rank}: {self.reason}", f"log: {self.log_file}"]
        if self.stacks:
            lines += ["stacks of all ranks:", self.stacks]
        elif self.log_tail:
            lines += ["the log ends with:", self.log_tail]
        return "\n".join(lines)


class EngineGroup:
    """Rank processes that live until `close`, the end of the `with` block, or the end of this process.

    Construction spawns the ranks and returns at once; several groups start in parallel. All methods may be used from
    several threads: one call runs at a time, `close` interrupts it.

    Args:
        spec: what to start.
        epoch: how often this group was restarted in this training; ranks refuse commands of another epoch.
    """

    def __init__(self, spec: GroupSpec, epoch: int = 0) -> None:
        self.spec = spec
        self.epoch = epoch
        # Re-entrant: a signal handler that closes the group must not deadlock with the call it interrupts.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._ready = False
        self._busy = False
        self._greeted: set[int] = set()
        self._silent_s = [0.0] * len(spec.devices)
        self._asked_for_echoes = -HEARTBEAT_S
        self._listener = channel.Listener(len(spec.devices))
        try:
            self._processes = launch.spawn(spec, epoch, self._listener.address)
        except BaseException:
            self._listener.close()
            raise
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when every rank has built its worker; a later call returns at once.

        Raises:
            EngineError, UserError: a worker could not be imported or built.
            RankLost: a rank exited, or was not ready within `start_timeout_s`.
        """
        with self._exclusive():
            if not self._ready:
                self._collect(START_KEY, START_KEY, self.spec.start_timeout_s)
                self._ready = True

    def call(
        self,
        command: str,
        *,
        key: str,
        timeout_s: float | None = None,
        per_rank: Sequence[dict[str, Any]] | None = None,
        on_news: Callable[[dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Run `command` on every rank and return the replies in rank order. Waits until the group is ready.

        Args:
            command: what the worker's `handle` is asked for.
            key: names this command; repeated, the stored reply comes back and nothing runs (last 32 commands).
            timeout_s: deadline, by default the spec's `command_timeout_s`.
            per_rank: arguments of each rank, over the shared `arguments`.
            on_news: gets what a rank tells ahead of its reply, and a reply while others are awaited; should be quick.

        Raises:
            EngineError: a rank's handler raised; UserError if it raised that.
            RankLost: a rank exited, fell silent, or did not reply in time.
            TypeError: an argument is nothing the channel carries; the group lives on.
        """
        own = [{}] * len(self.spec.devices) if per_rank is None else per_rank
        if len(own) != len(self.spec.devices):
            raise ValueError(f"{command!r}: arguments for {len(own)} ranks, the group has {len(self.spec.devices)}")
        message = {"kind": "command", "command": command, "key": key, "epoch": self.epoch}
        if per_rank is None:
            bodies = [channel.pack(message | {"arguments": arguments})] * len(own)
        else:
            bodies = [channel.pack(message | {"arguments": arguments | mine}) for mine in own]
        self.wait_ready()
        with self._exclusive():
            self._send(bodies)
            allowed_s = self.spec.command_timeout_s if timeout_s is None else timeout_s
            return self._collect(command, key, allowed_s, on_news)

    def close(self, grace_s: float = 10.0) -> None:
        """End every rank: politely, after `grace_s` with SIGTERM, then with SIGKILL. Interrupts a running call."""
        self._closing.set()
        with self._lock:
            if self._busy:
                return  # called by a signal handler: what it interrupts sees `_closing` and ends the ranks
            self._busy = True
            try:
                if self._ended is None:
                    self._say_goodbye()
                    launch.end(self._processes, grace_s if self._ready else 0.0)
            finally:
                self._kill(RuntimeError(f"engine group {self.spec.name!r} is closed"))
                self._busy = False

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time; unless it returns normally, no rank survives it."""
        with self._lock:
            if self._busy:
                raise RuntimeError(f"a signal handler called engine group {self.spec.name!r} in the middle of a call")
            self._busy = True
            try:
                self._check_open()
                yield
            except BaseException as error:
                self._kill(error)
                raise
            finally:
                self._busy = False

    def _say_goodbye(self) -> None:
        for rank in self._greeted:
            with suppress(zmq.ZMQError):  # a rank that vanished since needs no farewell
                self._listener.send(f"rank-{rank}", channel.pack({"kind": "shutdown"}))

    def _kill(self, cause: BaseException) -> None:
        """Leave no process, also where an earlier attempt was interrupted; `cause` is what later calls are told."""
        if self._ended is None:
            self._ended = cause
        launch.kill(self._processes)
        self._listener.close()
        atexit.unregister(self.close)

    def _check_open(self) -> None:
        if isinstance(self._ended, RankLost):
            lost = self._ended
            raise RankLost(lost.group, lost.rank, f"ended the group earlier: {lost.reason}", lost.log_file) from lost
        if self._ended is not None:
            raise RuntimeError(f"engine group {self.spec.name!r} has ended") from self._ended

    def _send(self, bodies: list[bytes]) -> None:
        self._receive(0.0)  # what came since the last call
        self._check_ranks()
        for rank, body in enumerate(bodies):
            try:
                self._listener.send(f"rank-{rank}", body)
            except zmq.ZMQError as error:
                raise self._lost(rank, f"unreachable: {error}", ask_stacks=True) from error

    def _collect(
        self, command: str, key: str, timeout_s: float, on_news: Callable[[dict[str, Any]], None] | None = None
    ) -> list[dict[str, Any]]:
        """Read until every rank has answered `key`."""
        replies: dict[int, dict[str, Any]] = {}
        errors: dict[int, Exception] = {}
        left_s = timeout_s
        while len(replies) + len(errors) < len(self._processes) and left_s > 0:
            if self._closing.is_set():
                raise RuntimeError(f"engine group {self.spec.name!r} was closed during {command!r}")
            messages, counted_s = self._receive(TICK_S)
            left_s -= counted_s
            for rank, message in messages:
                if message.get("key") != key:
                    continue
                if message["kind"] == "reply":
                    replies[rank] = message["result"]
                if message["kind"] != "error":
                    if on_news is not None and len(replies) < len(self._processes):
                        on_news(message["result"])
                    continue
                errors[rank] = self._error(rank, command, message)
                left_s = min(left_s, ERROR_GRACE_S)
            # Checked after reading: a rank's last words count, and an exit explains other ranks' errors.
            self._check_ranks(next(iter(errors.values()), None))
        if errors:
            raise next(iter(errors.values()))
        if missing := sorted(set(range(len(self._processes))) - replies.keys()):
            raise self._lost(missing[0], self._missed(missing, command, timeout_s), ask_stacks=True)
        return [replies[rank] for rank in range(len(self._processes))]

    def _receive(self, timeout_s: float) -> tuple[list[tuple[int, dict[str, Any]]], float]:
        """(rank, message) of what arrived, and the seconds that count against the ranks."""
        began = time.monotonic()
        if began - self._asked_for_echoes >= HEARTBEAT_S:
            self._asked_for_echoes = began
            self._ask_for_echoes()
        received = self._listener.receive(timeout_s)
        counted_s = min(time.monotonic() - began, COUNTED_PER_LOOK_S)
        self._silent_s = [silent_s + counted_s for silent_s in self._silent_s]
        messages = [(int(identity.rpartition("-")[2]), message) for identity, message in received]
        for rank, message in messages:
            self._silent_s[rank] = 0.0
            if message["kind"] == "hello":
                self._greeted.add(rank)
        return messages, counted_s

    def _ask_for_echoes(self) -> None:
        for rank in range(len(self._processes)):
            with suppress(zmq.ZMQError):  # it has not dialled yet, or is gone
                self._listener.send(f"rank-hb-{rank}", _HEARTBEAT)

    def _check_ranks(self, earlier: Exception | None = None) -> None:
        for process in self._processes:
            if reason := process.exit_reason():
                raise self._lost(process.rank, reason) from earlier
        if not self._ready:
            return  # a start has a deadline of its own
        for rank in range(len(self._processes)):
            if self._silent_s[rank] > self.spec.heartbeat_timeout_s:
                raise self._lost(rank, f"silent for {self._silent_s[rank]:.0f} s", ask_stacks=True) from earlier

    def _error(self, rank: int, command: str, message: dict[str, Any]) -> Exception:
        if message["user"]:
            return UserError(*message["user"])
        return EngineError(self.spec.name, rank, command, message["traceback"], self._processes[rank].log_file)

    def _lost(self, rank: int, reason: str, ask_stacks: bool = False) -> RankLost:
        process = self._processes[rank]
        tail = process.log_tail()
        stacks = launch.stacks(self._processes) if ask_stacks else ""
        return RankLost(self.spec.name, rank, reason, process.log_file, tail, stacks)

    def _missed(self, missing: list[int], command: str, timeout_s: float) -> str:
        if self._ready:
            others = f" (nor from rank {', '.join(map(str, missing[1:]))})" if missing[1:] else ""
            return f"no reply to {command!r} within {timeout_s:g} s{others}"
        stages = (
            f"rank {rank} {'was still building its worker' if rank in self._greeted else 'never said hello'}"
            for rank in missing
        )
        return f"not ready within {timeout_s:g} s: {', '.join(stages)}"
