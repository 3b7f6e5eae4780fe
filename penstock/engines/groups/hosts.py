"""The hosts of a training, seen from its flow: who has joined, who is lost, and commands that each carries out.

One host or many, the way is the same: a host dials the flow's listener, takes commands and tells which ranks have
ended. Where nothing else is asked for, the flow starts a single one as its child, on the loopback interface.

A thread reads for all and asks each host once a second for an echo, which needs no Python there. A host that is silent
for longer than it may be, or whose connection is gone and does not come back, is lost, and with it all its ranks. Time
is counted as for ranks: at most one second per look, so that a flow that was stopped blames nobody.

Left out: which machines there are, and who starts hosts on them (penstock/session/machines/hosts.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from penstock.engines.commands.hosts import (
    Dial,
    EndRanks,
    HostFacts,
    KeepReserve,
    KillRanks,
    MeetingPlace,
    RankPlace,
    StartRanks,
    TellFacts,
    TellLog,
    TellStacks,
)
from penstock.engines.commands.message import Command, Reply, WrongMessage, decode_reply, encode, name_of
from penstock.engines.groups import channel, interface
from penstock.engines.groups.environment import inherited
from penstock.engines.groups.host import HostStart
from penstock.engines.groups.processes import start_kept
from penstock.engines.groups.said import BY_HOSTS, checked, error_of
from penstock.engines.groups.spec import LOCAL, GroupSpec

LOOK_S = 0.2
COUNTED_PER_LOOK_S = 1.0
HEARTBEAT_S = 1.0
HUNG_UP = 2  # heartbeats without a connection; at the next one the host counts as lost
SILENCE_S = 15.0
REPLY_S = 30.0  # to a command that takes no time of its own: a host may be busy with ending a group
MOST_ENDS = 10_000  # that a host can tell of: a training starts fewer ranks on a machine
LEAVE_S, LEAVING_LOOK_S = 5.0, 0.02  # for hosts to leave once it is over
KILL_S = 20.0  # longer than a host waits for a process that a driver holds
_ALIVE = channel.pack({"kind": "alive"})

_log = logging.getLogger(__name__)


class HostFailed(RuntimeError):
    """A host could not carry out a command, or is lost: `host` names it, `reason` says what is known."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(host, reason)
        self.host, self.reason = host, reason

    def __str__(self) -> str:
        return f"host {self.host}: {self.reason}"


@dataclass(eq=False)
class Joined:
    """A host that has dialled.

    Attributes:
        machine: name of its machine.
        silent_s: counted seconds since it was heard.
        hung_up: in how many looks at it, one after the other, it had no connection.
        lost: why it counts as lost.
        ends: how ranks ended, by group, epoch and rank.
    """

    machine: str
    silent_s: float = 0.0
    hung_up: int = 0
    lost: str | None = None
    ends: dict[tuple[str, int, int], str] = field(default_factory=dict)


@dataclass(eq=False)
class _Asked:
    host: str
    kind: type[Command[Any]]
    reply: Future[Any]


class Hosts:
    """The flow's hosts until `close`, or the end of the `with` block; all methods may be used from several threads.

    Args:
        listen: address and port of this machine on which hosts dial; port 0: any.
        expected: names of hosts that will dial by themselves, once they are started elsewhere.
        silence_s: a host that is silent for longer is lost.
        log_dir: where the host on this machine writes what it prints.
        keys: of the channel; None: new ones.
        kept: descriptors that the host on this machine keeps open until nothing of it is left.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        listen: tuple[str, int] = (interface.LOOPBACK, 0),
        expected: Sequence[str] = (),
        silence_s: float = SILENCE_S,
        keys: channel.Keys | None = None,
        kept: Sequence[int] = (),
    ) -> None:
        self._kept = kept
        self._log_dir, self._silence_s, self._expected = log_dir, silence_s, set(expected)
        self._listener = channel.Listener([*expected, LOCAL], listen, keys)
        self._joined: dict[str, Joined] = {}
        self._changes = threading.Condition(threading.RLock())  # of who has joined, and whether this is open
        self._waiting: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._undelivered: dict[str, list[bytes]] = {}  # commands for hosts that have not dialled yet
        self._asked: dict[int, _Asked] = {}
        self._numbers = iter(range(1, sys.maxsize))
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> channel.Address:
        """Where hosts dial, with the keys that let them in."""
        return self._listener.address

    @property
    def listens_on(self) -> str:
        """The address on which the flow listens, for hosts and ranks alike."""
        return self._listener.host

    def start_local(self) -> None:
        """Start a host on this machine, which ends with this process; commands to it may be given at once."""
        if self._child is not None:
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / "host.log").open("ab") as log:
            self._child = start_host(HostStart(LOCAL, self.address), log, self._kept)

    def joined(self) -> dict[str, Joined]:
        """Return who has dialled, by name."""
        with self._changes:
            return dict(self._joined)

    def missing(self, of: Collection[str] | None = None) -> list[str]:
        """Return the hosts that have not dialled, among some; None: among all that are expected."""
        return sorted(set(self._expected if of is None else of) - self.joined().keys())

    def wait_joined(self, timeout_s: float, of: Collection[str] | None = None) -> bool:
        """Wait until every host has dialled, or every one of some; return whether all have."""
        with self._changes:
            return self._changes.wait_for(lambda: not self.missing(of), timeout_s)

    def begin(self, host: str, command: Command[Reply]) -> Future[Reply]:
        """Give a host a command; the future gets its reply. One that has not dialled yet gets it when it does.

        The future raises `UserError` of the host, and `HostFailed` where it could not carry out the command or is lost.
        """
        reply: Future[Reply] = Future()
        with self._changes:
            if reason := self.lost(host):
                reply.set_exception(HostFailed(host, reason))
                return reply
            kind, number = type(command), next(self._numbers)
            message = {"kind": "command", "command": name_of(kind), "number": number, "fields": encode(command)}
            self._asked[number] = _Asked(host, kind, reply)
            self._waiting.put((host, channel.pack(message)))
            self._listener.wake()
        return reply

    def facts(self) -> dict[str, HostFacts]:
        """Return what every host's machine has.

        Raises:
            HostFailed: one is lost.
        """
        replies = {host: self.begin(host, TellFacts()) for host in self.joined()}
        return {host: reply.result(REPLY_S) for host, reply in replies.items()}

    def lost(self, host: str) -> str | None:
        """Return why a host counts as lost, or None."""
        joined = self._joined.get(host)
        if joined is not None and joined.lost is not None:
            return joined.lost
        if host == LOCAL and self._child is not None and (code := self._child.poll()) is not None:
            return f"its process exited with code {code} (log: {self._log_dir / 'host.log'})"
        return "these hosts are closed" if self._closing.is_set() else None

    def await_again(self, host: str) -> None:
        """Let another process take the place of a lost host; the one on this machine is started, others will dial."""
        with self._changes:
            self._joined = {name: joined for name, joined in self._joined.items() if name != host}
            self._undelivered.pop(host, None)  # it was for the lost one
            child, self._child = self._child, None if host == LOCAL else self._child
        self._listener.await_again(host)
        if host == LOCAL and child is not None:
            _end(child, 0.0)
            self.start_local()

    def silent_s(self, host: str) -> float:
        """Return for how many counted seconds a host has not been heard."""
        joined = self._joined.get(host)
        return 0.0 if joined is None else joined.silent_s

    def end_of(self, host: str, group: str, epoch: int, rank: int) -> str | None:
        """Return how a rank ended, or None where nothing is known of it."""
        joined = self._joined.get(host)
        return None if joined is None else joined.ends.get((group, epoch, rank))

    def close(self) -> None:
        """Let every host go, with what is left of its ranks, and wait until they have. A second call does nothing."""
        with self._changes:
            if self._closing.is_set():
                return
            self._closing.set()
            self._listener.wake()
        self._thread.join()
        if self._child is not None:
            _end(self._child, LEAVE_S if LOCAL in self._joined else 0.0)  # who has not joined has not heard of the end
        self._listener.close()
        for asked in self._asked.values():
            if not asked.reply.done():
                asked.reply.set_exception(HostFailed(asked.host, "these hosts are closed"))
        atexit.unregister(self.close)

    # ---- the thread that reads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asked_for_echoes = -HEARTBEAT_S
        while not self._closing.is_set():
            began = time.monotonic()
            if began - asked_for_echoes >= HEARTBEAT_S:
                asked_for_echoes = began
                self._ask_for_echoes()
            self._deliver()
            received = self._listener.receive(LOOK_S)
            counted_s = min(time.monotonic() - began, COUNTED_PER_LOOK_S)
            for joined in self._joined.values():
                joined.silent_s += counted_s
            for identity, message in received:
                self._take(identity, message)
            self._look_for_losses()
        self._let_go()

    def _let_go(self) -> None:
        """Tell every host that it is over, and wait until it has hung up: what is sent last is not lost then."""
        there = [host for host, joined in self._joined.items() if joined.lost is None]
        for host in there:
            self._reaches(host, channel.pack({"kind": "shutdown"}))
        deadline = time.monotonic() + LEAVE_S
        while (there := [host for host in there if self._reaches(host, _ALIVE)]) and time.monotonic() < deadline:
            self._listener.receive(LEAVING_LOOK_S)

    def _reaches(self, host: str, body: bytes) -> bool:
        """Send to a host; return whether it has a connection."""
        try:
            self._listener.send(host, body)
        except zmq.ZMQError:
            return False
        return True

    def _ask_for_echoes(self) -> None:
        for host, joined in self._joined.items():
            with suppress(zmq.ZMQError):
                self._listener.send(channel.echo_name(host), _ALIVE)
            # A connection that breaks is made anew in a fraction of a second.
            joined.hung_up = 0 if self._reaches(host, _ALIVE) else joined.hung_up + 1

    def _deliver(self) -> None:
        while not self._waiting.empty():
            host, body = self._waiting.get()
            joined = self._joined.get(host)
            if joined is None:
                self._undelivered.setdefault(host, []).append(body)
            elif joined.lost is None:
                self._send(host, body)
            else:
                self._lose(host, joined.lost)

    def _send(self, host: str, body: bytes) -> None:
        try:
            self._listener.send(host, body)
        except zmq.ZMQError as error:
            self._lose(host, f"unreachable: {error}")

    def _take(self, identity: str, said: Any) -> None:
        host = channel.name_of(identity)
        joined = self._joined.get(host)
        try:
            message = checked(said, BY_HOSTS)
        except WrongMessage as error:
            self._lose(host, f"{joined.machine if joined else host} said what is no message of a host: {error}")
            return
        if joined is not None:
            joined.silent_s = 0.0
        if message["kind"] == "hello":
            self._welcome(host, message)
        elif message["kind"] == "exit" and joined is not None:
            joined.ends[message["group"], message["epoch"], message["rank"]] = message["reason"]
            if len(joined.ends) > MOST_ENDS:
                self._lose(host, f"{joined.machine} told of more than {MOST_ENDS} ranks that have ended")
        elif "number" in message and (asked := self._asked.get(message["number"])) is not None and asked.host == host:
            del self._asked[message["number"]]
            self._settle(asked, message)

    def _welcome(self, host: str, message: dict[str, Any]) -> None:
        if host not in self._expected and not (host == LOCAL and self._child is not None):
            _log.warning("a host that nobody expects has dialled: %s on %s", host, message["machine"])
            return
        with self._changes:
            self._joined[host] = Joined(message["machine"])
            self._changes.notify_all()
        for body in self._undelivered.pop(host, []):
            self._send(host, body)

    def _settle(self, asked: _Asked, message: dict[str, Any]) -> None:
        if message["kind"] == "mistake":
            asked.reply.set_exception(error_of(message["user"]))
        elif message["kind"] == "error":
            asked.reply.set_exception(HostFailed(asked.host, message["traceback"].strip()))
        else:
            try:
                asked.reply.set_result(decode_reply(asked.kind, message["result"]))
            except WrongMessage as error:  # of whoever asked, not of the thread that all others need
                asked.reply.set_exception(error)

    def _look_for_losses(self) -> None:
        for host, joined in list(self._joined.items()):
            if joined.lost is None and joined.silent_s > self._silence_s:
                self._lose(host, f"{joined.machine} is silent for {joined.silent_s:.0f} s")
            if joined.lost is None and joined.hung_up > HUNG_UP:
                self._lose(host, f"{joined.machine} has hung up: the host there has ended")
        with self._changes:  # nobody starts another one meanwhile
            if self._child is not None and self._child.poll() is not None:
                self._lose(LOCAL, self.lost(LOCAL) or "")

    def _lose(self, host: str, reason: str) -> None:
        """Let everybody who waits for a host know that it is lost."""
        if (joined := self._joined.get(host)) is not None and joined.lost is None:
            joined.lost = reason
        for number, asked in list(self._asked.items()):
            if asked.host == host:
                del self._asked[number]
                asked.reply.set_exception(HostFailed(host, reason))


class StartedRanks:
    """The rank processes of a group, wherever its hosts are. Made at once; that a start failed is told by `failed`.

    Args:
        address: where the ranks dial.
    """

    def __init__(self, hosts: Hosts, spec: GroupSpec, epoch: int, address: channel.Address) -> None:
        self._hosts, self._spec, self._epoch = hosts, spec, epoch
        first, *others = spec.hosts
        # The store of torch.distributed is on the first rank's machine, which chooses where: the others are told then.
        self._starts = {first: hosts.begin(first, self._start(first, address, None))}
        if others:
            self._starts[first].add_done_callback(lambda reply: self._start_others(others, address, reply))

    def _start(self, host: str, address: channel.Address, meet: MeetingPlace | None) -> StartRanks:
        return StartRanks(
            group=self._spec.name,
            epoch=self._epoch,
            ranks=[RankPlace(rank, self._spec.devices[rank].gpu) for rank in self._spec.ranks_on(host)],
            world_size=len(self._spec.devices),
            worker=self._spec.worker,
            dial=Dial(**asdict(address)),
            meet=meet,
            log_dir=str(self._spec.log_dir.absolute()),
            folder=str(Path.cwd()),
            path=sys.path,
        )

    def _start_others(self, others: Sequence[str], address: channel.Address, first: Future[MeetingPlace]) -> None:
        if first.exception() is None:
            meet = first.result()
            self._starts |= {host: self._hosts.begin(host, self._start(host, address, meet)) for host in others}

    def failed(self) -> BaseException | None:
        """Return why a host has not started its ranks, or None."""
        return next((why for start in list(self._starts.values()) if start.done() and (why := start.exception())), None)

    def end_of(self, rank: int) -> str | None:
        """Return how a rank ended, or None."""
        return self._hosts.end_of(self._spec.devices[rank].host, self._spec.name, self._epoch, rank)

    def lost_with(self, rank: int) -> str | None:
        """Return that the host of a rank is lost, and why, or None."""
        host = self._spec.devices[rank].host
        return f"its host {host} is lost: {reason}" if (reason := self._hosts.lost(host)) else None

    def host_silent_s(self, rank: int) -> float:
        """Return for how many counted seconds the host of a rank has not been heard."""
        return self._hosts.silent_s(self._spec.devices[rank].host)

    def log_tail(self, rank: int) -> str:
        """Return the end of a rank's log, nothing where its host is lost."""
        hosts, command = [self._spec.devices[rank].host], TellLog(self._spec.name, self._epoch, rank)
        return self._replies(hosts, command, REPLY_S)[0] or ""

    def stacks(self) -> str:
        """Return the Python stacks of all ranks that can be asked; takes a second."""
        replies = self._replies(self._spec.hosts, TellStacks(self._spec.name, self._epoch), REPLY_S)
        texts = {rank: text for reply in replies if reply for rank, text in reply.items()}
        return "\n".join(
            f"rank {rank}:\n{texts.get(rank) or '(no stacks: the process does not react)'}"
            for rank in range(len(self._spec.devices))
        )

    def keep_reserve(self, module: str) -> None:
        """Let a process beside each rank import a module, and be the next rank there; nobody waits for it."""
        for host in self._spec.hosts:
            self._hosts.begin(host, KeepReserve(self._spec.name, self._epoch, module))

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for the ranks to leave, then SIGTERM, then SIGKILL; whatever happens, all are gone after."""
        self._replies(self._spec.hosts, EndRanks(self._spec.name, self._epoch, grace_s), grace_s + KILL_S)

    def kill(self) -> None:
        """SIGKILL every rank with all that it has started; those that have ended are let be."""
        self._replies(self._spec.hosts, KillRanks(self._spec.name, self._epoch), KILL_S)

    def _replies(self, hosts: Sequence[str], command: Command[Reply], timeout_s: float) -> list[Reply | None]:
        """Ask hosts side by side; None stands for what a lost one would have said."""
        asked = [self._hosts.begin(host, command) for host in hosts]
        deadline = time.monotonic() + timeout_s
        return [_result(reply, deadline - time.monotonic()) for reply in asked]


def _result(reply: Future[Reply], timeout_s: float) -> Reply | None:
    try:
        return reply.result(max(0.0, timeout_s))
    except (HostFailed, TimeoutError) as error:
        _log.info("%s", error or "a host does not answer")
        return None


def start_host(start: HostStart, log: Any, kept: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a host below a keeper that ends with this process; return the keeper, which ends as the host does.

    Args:
        log: file or descriptor that gets what it prints.
        kept: descriptors that both keep open: the keeper ends last, once no rank is left.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = inherited() | {"PYTHONPATH": path}
    keeper, _ = start_kept(["penstock.engines.groups.host"], start.to_json(), environment, log, kept=kept)
    return keeper


def _end(keeper: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait for a host to leave by itself, then have its keeper kill it with all its ranks."""
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(grace_s)
    if keeper.returncode is None:
        keeper.terminate()
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(KILL_S)
