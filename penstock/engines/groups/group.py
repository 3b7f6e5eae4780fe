"""An engine group, seen from the flow: rank processes that take commands in order, each all of them or none.

`begin` sends a command to every rank; `call` also reads until every rank has replied. A command may be sent while
others are unanswered: the ranks decide what begins at once (penstock/engines/groups/rank.py), and replies are told
apart by command and key. Of the threads that wait, one reads for all.

Who reads also watches the processes and asks each once a second for an echo, which needs no Python there (channel.py),
so a dead, stuck or silent rank is named within its deadline. A call that does not return normally kills the whole
group: after half a command the ranks' collectives are out of step, and a group that cannot be trusted is worth less
than its next epoch, which begins from what the training has kept.

Time is counted only while a call reads, at most one second per look, and against the oldest unanswered call: later ones
may have to wait for it. Hence a flow that was idle, stopped or starved does not blame its ranks.

Left out: starting anew (penstock/flows/parts/recovery.py makes a group of the next epoch) and what commands mean.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from penstock.base.stacks import stacks_of_threads
from penstock.engines.commands.message import WrongMessage
from penstock.engines.groups import channel
from penstock.engines.groups.hosts import Hosts, StartedRanks
from penstock.engines.groups.said import BY_RANKS, checked, error_of
from penstock.engines.groups.spec import LOCAL, START_KEY, GroupSpec, RankDevice

__all__ = [
    "Call",
    "EngineError",
    "EngineGroup",
    "GroupSpec",
    "HostLost",
    "LostTooOften",
    "OutOfMemory",
    "RankDevice",
    "RankLost",
    "RolloutStalled",
]

TICK_S = 0.2  # an exited process is noticed this fast
COUNTED_PER_LOOK_S = 1.0
HEARTBEAT_S = 1.0
_HEARTBEAT = channel.pack({"kind": "heartbeat"})
REASON_S = 5.0  # for news of how a rank ended that is not connected any more; a host that is gone is known by then
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


class GroupClosed(RuntimeError):
    """This side has ended the group, before a command or during it."""


class RankLost(RuntimeError):
    """A rank exited, fell silent or missed a deadline. The group has been ended.

    `log_tail` is the end of the rank's log; `stacks` are those of all ranks, where a process was still there to ask.
    `unheard_s` says how long ago the rank, or its host, was last heard, by the clock that counts against it: it has not
    been lost for longer. `flow_stacks` are those of the flow's threads, where a deadline has passed.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        reason: str,
        log_file: Path,
        log_tail: str = "",
        stacks: str = "",
        unheard_s: float = 0.0,
        flow_stacks: str = "",
    ) -> None:
        super().__init__(group, rank, reason, log_file, log_tail, stacks, unheard_s, flow_stacks)
        self.group, self.rank, self.reason, self.log_file = group, rank, reason, log_file
        self.log_tail, self.stacks, self.unheard_s, self.flow_stacks = log_tail, stacks, unheard_s, flow_stacks

    def __str__(self) -> str:
        lines = [f"group {self.group!r}, rank {self.rank}: {self.reason}", f"log: {self.log_file}"]
        if self.stacks:
            lines += ["stacks of all ranks:", self.stacks]
        elif self.log_tail:
            lines += ["the log ends with:", self.log_tail]
        return "\n".join(lines)


class HostLost(RankLost):
    """The machine of a rank is lost, or its host is. The group has been ended."""


class OutOfMemory(RankLost):
    """A rank found no memory left on its GPU for a command. The group has been ended.

    Its processes are new when it goes on, so the memory is not fragmented any more.
    """

    def __init__(self, group: str, rank: int, command: str, log_file: Path, said: str = "") -> None:
        super().__init__(group, rank, f"no memory left on its GPU for {command!r}", log_file, said)
        self.args = (group, rank, command, log_file, said)
        self.command = command


class RolloutStalled(RankLost):
    """The engines have not ended a generation by the deadline of a command, though all are there."""


class LostTooOften(RankLost):
    """Ranks or hosts are lost more often than a training goes on after (`engine.restarts`); this is the last loss."""


Hear = Callable[[dict[str, Any]], None]


@dataclass(eq=False)
class Call:
    """A command that was sent to every rank of a group, and what has come back.

    Attributes:
        command: as ranks name it.
        key: with the command, what tells its replies from others.
        ranks: that are to reply.
        allowed_s: deadline.
        left_s: what is left of it.
        on_news: gets what a rank tells ahead of its reply, and a reply while others are awaited.
    """

    command: str
    key: str
    ranks: int
    allowed_s: float
    left_s: float
    on_news: Hear | None = None
    replies: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether every rank has replied or failed."""
        return len(self.replies) + len(self.errors) == self.ranks

    @property
    def first_error(self) -> Exception:
        """What went wrong first."""
        return next(iter(self.errors.values()))

    @property
    def missing(self) -> list[int]:
        """Ranks that have not replied."""
        return sorted(set(range(self.ranks)) - self.replies.keys())

    def hear(self, message: dict[str, Any]) -> None:
        """Hand on a rank's news, or its reply, to who listens."""
        if self.on_news is not None and len(self.replies) < self.ranks:
            self.on_news(message["result"])


class EngineGroup:
    """Rank processes that live until `close`, the end of the `with` block, or the end of this process.

    Construction has the hosts start the ranks and returns at once; several groups start in parallel. All methods may be
    used from several threads; `close` interrupts their calls.

    Args:
        spec: what to start.
        hosts: those that the spec names; None: one on this machine, which is the group's own.
        epoch: how often this group was restarted in this training; ranks refuse commands of another epoch.
    """

    def __init__(self, spec: GroupSpec, hosts: Hosts | None = None, epoch: int = 0) -> None:
        self.spec = spec
        self.epoch = epoch
        # Re-entrant: a signal handler that closes the group must not deadlock with the call it interrupts.
        self._changes = threading.Condition(threading.RLock())  # of what follows
        self._owner: int | None = None  # the thread whose turn it is: socket and processes are its own meanwhile
        self._senders = 0  # threads that wait for a turn and do not want to read
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._ready = False
        self._start = Call(START_KEY, START_KEY, len(spec.devices), spec.start_timeout_s, spec.start_timeout_s)
        self._calls = [self._start]  # unanswered ones, oldest first
        self._greeted: set[int] = set()
        self._silent_s = [0.0] * len(spec.devices)
        self._asked_for_echoes = -HEARTBEAT_S
        self._own_hosts = Hosts(spec.log_dir) if hosts is None else None
        hosts = hosts or self._own_hosts
        assert hosts is not None
        self.hosts = hosts
        if LOCAL in spec.hosts:
            hosts.start_local()
        self._listener = channel.Listener([f"rank-{rank}" for rank in range(len(spec.devices))], (hosts.listens_on, 0))
        self._ranks = StartedRanks(hosts, spec, epoch, self._listener.address)
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
        self.replies(self._start)

    def loss(self) -> RankLost | None:
        """Return how the group was lost, as far as that is known without a call that finds it out; None: it is not."""
        if isinstance(self._ended, RankLost):
            return self._ended
        self._check_open()
        try:
            self._check_ranks()
        except RankLost as lost:
            return lost
        return None

    def answers(self, within_s: float) -> bool:
        """Whether every rank is heard now: each is asked for an echo, which it gives whatever it is doing.

        Raises:
            RankLost: one is lost.
        """
        with self._turn_to_send():
            self._check_open()
            self._look(0.0)  # echoes of what was asked before do not count
            self._ask_for_echoes()
            asked, heard = time.monotonic(), set[int]()
            while len(heard) < len(self.spec.devices) and time.monotonic() - asked < within_s:
                self._look(TICK_S)
                heard |= {rank for rank, silent_s in enumerate(self._silent_s) if not silent_s}
        return len(heard) == len(self.spec.devices)

    def keep_reserve(self, module: str) -> None:
        """Have a module imported beside each rank, so that the ranks of the next epoch need not."""
        self._ranks.keep_reserve(module)

    def call(self, command: str, *, key: str, **options: Any) -> list[dict[str, Any]]:
        """Run `command` on every rank and return the replies in rank order: `begin` and `replies`, which see."""
        return self.replies(self.begin(command, key=key, **options))

    def begin(
        self,
        command: str,
        *,
        key: str,
        timeout_s: float | None = None,
        per_rank: Sequence[dict[str, Any]] | None = None,
        on_news: Hear | None = None,
        **arguments: Any,
    ) -> Call:
        """Send `command` to every rank, also while earlier ones are unanswered. Waits until the group is ready.

        Args:
            command: what the worker's `handle` is asked for.
            key: names this command; repeated, the stored reply comes back and nothing runs (last 32 commands).
            timeout_s: deadline, by default the spec's `command_timeout_s`.
            per_rank: arguments of each rank, over the shared `arguments`.
            on_news: gets what a rank tells ahead of its reply, and a reply while others are awaited; should be quick.
                Whichever thread reads calls it.

        Raises:
            EngineError, RankLost, UserError: as `replies`.
            TypeError: an argument is nothing the channel carries; the group lives on.
            ValueError: arguments for another number of ranks, or this command is unanswered under this key; likewise.
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
        allowed_s = self.spec.command_timeout_s if timeout_s is None else timeout_s
        call = Call(command, key, len(own), allowed_s, allowed_s, on_news)
        with self._turn_to_send():
            self._check_open()
            repeated = any((other.command, other.key) == (command, key) for other in self._calls)
            if not repeated:
                self._send(bodies)
                self._calls.append(call)
        if repeated:
            raise ValueError(f"{command!r} is not answered yet under the key {key!r}: wait for it, or take another key")
        return call

    def replies(self, call: Call) -> list[dict[str, Any]]:
        """Wait until every rank has replied to a call, and return the replies in rank order.

        Raises:
            EngineError: a rank's handler raised, of this call or of another one; UserError if it raised that.
            RankLost: a rank exited, fell silent, or did not reply in time.
        """
        while call in self._calls:
            with self._turn_to_read(call) as mine:
                if mine:
                    self._look(TICK_S)
        return [call.replies[rank] for rank in range(call.ranks)]

    def close(self, grace_s: float = 10.0) -> None:
        """End every rank: politely, after `grace_s` with SIGTERM, then with SIGKILL. Interrupts running calls."""
        self._closing.set()
        if self._owner == threading.get_ident():
            return  # called by a signal handler: what it interrupts sees `_closing` and ends the ranks
        with self._turn_to_send():
            try:
                if self._ended is None and self._calls in ([], [self._start]):
                    self._say_goodbye()
                    self._ranks.end(grace_s if self._ready else 0.0)
            finally:
                self._kill(GroupClosed(f"engine group {self.spec.name!r} is closed"))

    # ---- turns -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn_to_send(self) -> Iterator[None]:
        """Wait until nobody else reads, sends or ends; unless the turn ends normally, no rank survives it."""
        with self._turn():
            with self._changes:
                self._senders += 1
                if self._ended is None:
                    self._listener.wake()  # who reads need not wait until something comes
                try:
                    self._changes.wait_for(lambda: self._owner is None)
                finally:
                    self._senders -= 1
                self._owner = threading.get_ident()
            yield

    @contextmanager
    def _turn_to_read(self, call: Call) -> Iterator[bool]:
        """Wait likewise, and for those who send; no turn, but False, where another thread has read all replies."""
        with self._turn():
            with self._changes:
                self._changes.wait_for(lambda: call not in self._calls or (self._owner is None and not self._senders))
                unanswered = call in self._calls
                if unanswered:
                    self._owner = threading.get_ident()
            if call.errors and self._ended is not None:
                raise call.first_error  # another thread has read it
            if unanswered and self._closing.is_set():
                raise GroupClosed(f"engine group {self.spec.name!r} was closed during {call.command!r}")
            if unanswered:
                self._check_open()
            yield unanswered

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """End the turn that is taken in the block; where it is not left normally no rank survives."""
        own = threading.get_ident()
        if self._owner == own:
            raise RuntimeError(f"a signal handler called engine group {self.spec.name!r} in the middle of a call")
        try:
            yield
        except BaseException as error:
            if self._owner == own:
                self._kill(error)
            elif self._ended is None:
                self.close(grace_s=0.0)  # interrupted while another thread reads
            raise
        finally:
            with self._changes:
                if self._owner == own:
                    self._owner = None
                self._changes.notify_all()

    # ---- what is done in a turn ------------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        for rank in self._greeted:
            with suppress(zmq.ZMQError):  # a rank that vanished since needs no farewell
                self._listener.send(f"rank-{rank}", channel.pack({"kind": "shutdown"}))

    def _kill(self, cause: BaseException) -> None:
        """Leave no process, also where an earlier attempt was interrupted; `cause` is what later calls are told."""
        if self._ended is None:
            self._ended = cause
        self._ranks.kill()
        if self._own_hosts is not None:
            self._own_hosts.close()
        with self._changes:  # nobody wakes a reader meanwhile
            self._listener.close()
        atexit.unregister(self.close)

    def _check_open(self) -> None:
        if isinstance(self._ended, OutOfMemory):
            raise OutOfMemory(*self._ended.args) from self._ended  # its command says what the training goes on with
        if isinstance(self._ended, RankLost):
            lost = self._ended
            reason = f"ended the group earlier: {lost.reason}"
            raise type(lost)(lost.group, lost.rank, reason, lost.log_file, unheard_s=lost.unheard_s) from lost
        if self._ended is not None:
            kind = GroupClosed if isinstance(self._ended, GroupClosed) else RuntimeError
            raise kind(f"engine group {self.spec.name!r} has ended") from self._ended

    def _send(self, bodies: list[bytes]) -> None:
        self._look(0.0)  # what came since the last look
        for rank, body in enumerate(bodies):
            try:
                self._listener.send(f"rank-{rank}", body)
            except zmq.ZMQError as error:
                self._await_reason()
                raise self._lost(rank, f"unreachable: {error}", ask_stacks=True) from error

    def _await_reason(self) -> None:
        """Raise what becomes known of a loss: a connection is gone before anybody tells how a rank or host ended."""
        deadline = time.monotonic() + REASON_S
        while time.monotonic() < deadline:
            self._look(TICK_S)

    def _look(self, timeout_s: float) -> None:
        """Take in what comes, for whichever call, and see whether the ranks are well."""
        messages, counted_s = self._receive(timeout_s)
        for call in self._calls:
            if call is self._calls[0] or call.errors:
                call.left_s -= counted_s
        for rank, message in messages:
            self._file(rank, message)
        failed = next((call for call in self._calls if call.errors), None)
        # Checked after reading: a rank's last words count, and an exit explains other ranks' errors.
        self._check_ranks(None if failed is None else failed.first_error)
        for call in list(self._calls):
            self._settle(call)

    def _file(self, rank: int, message: dict[str, Any]) -> None:
        """Give a message to the call that it answers; what answers none is no concern of anybody."""
        name = (message.get("command"), message.get("key"))
        call = next((call for call in self._calls if (call.command, call.key) == name), None)
        if call is None:
            return
        if message["kind"] == "error":
            call.errors[rank] = self._error(rank, call.command, message)
            call.left_s = min(call.left_s, ERROR_GRACE_S)
            return
        if message["kind"] == "reply":
            call.replies[rank] = message["result"]
        try:
            call.hear(message)
        except WrongMessage as error:  # whichever call's thread reads: it would not know whose words they were
            raise self._lost(rank, f"told what is no news of {call.command!r}: {error}") from error

    def _settle(self, call: Call) -> None:
        """Take leave of a call that is answered; raise what went wrong with it, if it is time to."""
        if not call.answered and call.left_s > 0:
            return
        if call.errors:
            raise call.first_error
        if call.missing:
            flow_stacks = stacks_of_threads()  # before the ranks are asked for theirs
            raise self._lost(call.missing[0], self._missed(call), ask_stacks=True, flow_stacks=flow_stacks)
        self._calls.remove(call)
        self._ready = True

    def _receive(self, timeout_s: float) -> tuple[list[tuple[int, dict[str, Any]]], float]:
        """(rank, message) of what arrived, and the seconds that count against the ranks."""
        began = time.monotonic()
        if began - self._asked_for_echoes >= HEARTBEAT_S:
            self._asked_for_echoes = began
            self._ask_for_echoes()
        received = self._listener.receive(timeout_s)
        counted_s = min(time.monotonic() - began, COUNTED_PER_LOOK_S)
        self._silent_s = [silent_s + counted_s for silent_s in self._silent_s]
        messages = [self._said(identity, message) for identity, message in received]
        for rank, message in messages:
            self._silent_s[rank] = 0.0
            if message["kind"] == "hello":
                self._greeted.add(rank)
        return messages, counted_s

    def _said(self, identity: str, message: Any) -> tuple[int, dict[str, Any]]:
        rank = int(channel.name_of(identity).removeprefix("rank-"))
        try:
            return rank, checked(message, BY_RANKS)
        except WrongMessage as error:
            raise self._lost(rank, f"said what is no message of a rank: {error}") from error

    def _ask_for_echoes(self) -> None:
        for rank in range(len(self.spec.devices)):
            with suppress(zmq.ZMQError):  # it has not dialled yet, or is gone
                self._listener.send(channel.echo_name(f"rank-{rank}"), _HEARTBEAT)

    def _check_ranks(self, earlier: Exception | None = None) -> None:
        for rank in range(len(self.spec.devices)):
            if reason := self._ranks.end_of(rank):
                raise self._lost(rank, reason) from earlier
            if reason := self._ranks.lost_with(rank):
                unheard_s = max(self._silent_s[rank], self._ranks.host_silent_s(rank))
                log_file = self.spec.log_file(rank)
                raise HostLost(self.spec.name, rank, reason, log_file, unheard_s=unheard_s) from earlier
        if not self._ready and (failed := self._ranks.failed()) is not None:
            raise failed
        if not self._ready:
            return  # a start has a deadline of its own
        for rank in range(len(self.spec.devices)):
            if self._silent_s[rank] > self.spec.heartbeat_timeout_s:
                raise self._lost(rank, f"silent for {self._silent_s[rank]:.0f} s", ask_stacks=True) from earlier

    def _error(self, rank: int, command: str, message: dict[str, Any]) -> Exception:
        if message["user"]:
            return error_of(message["user"])
        if message["out_of_memory"]:
            last_line = message["traceback"].strip().rpartition("\n")[2]
            return OutOfMemory(self.spec.name, rank, command, self.spec.log_file(rank), last_line)
        return EngineError(self.spec.name, rank, command, message["traceback"], self.spec.log_file(rank))

    def _lost(self, rank: int, reason: str, ask_stacks: bool = False, flow_stacks: str = "") -> RankLost:
        tail = self._ranks.log_tail(rank)
        stacks = self._ranks.stacks() if ask_stacks else ""
        unheard_s = self._silent_s[rank]
        return RankLost(self.spec.name, rank, reason, self.spec.log_file(rank), tail, stacks, unheard_s, flow_stacks)

    def _missed(self, call: Call) -> str:
        missing = call.missing
        if self._ready:
            others = f" (nor from rank {', '.join(map(str, missing[1:]))})" if missing[1:] else ""
            return f"no reply to {call.command!r} within {call.allowed_s:g} s{others}"
        stages = (
            f"rank {rank} {'was still building its worker' if rank in self._greeted else 'never said hello'}"
            for rank in missing
        )
        return f"not ready within {call.allowed_s:g} s: {', '.join(stages)}"
