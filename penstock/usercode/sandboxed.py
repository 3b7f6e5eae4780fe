"""A worker process whose calls run in a sandbox: this process outside, a Python process inside, and what they say.

    RewardPool -- Pebble's worker, outside -- bubblewrap -- the user's code, inside

The worker outside runs none of the user's code. It sends calls in, pickled, since the training wrote them; what comes
out is JSON of the type that the function declares, and of limited length: pickled, it could run code where no sandbox
is. When the process inside ends, the worker ends likewise, so pools see what they see without a sandbox.

Ten times a second of a call the worker looks at the memory and the number of processes of the whole sandbox. What a
call has started and left behind ends when the call returns; what began while the module was imported stays. A value
whose attribute `under_way` is not empty says that calls go on behind it: then nothing ends yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from pydantic import TypeAdapter, ValidationError

from penstock.usercode.guard import begin_worker
from penstock.usercode.sandbox import Sandbox

LOOK_S = 0.1
MOST_BYTES = 256 << 20  # of a reply
PROCESSES = Path("/proc")
_GREETING = b"here"
_PAGE = os.sysconf("SC_PAGE_SIZE")

# Exit codes of a worker whose sandbox it has ended, and why.
TOO_MUCH_MEMORY, TOO_MANY_PROCESSES, NO_REPLY = 221, 222, 223
REASONS = {
    TOO_MUCH_MEMORY: "used more memory than its sandbox allows (sandbox.memory_gib)",
    TOO_MANY_PROCESSES: "had more processes than its sandbox allows (sandbox.processes)",
    NO_REPLY: "gave a reply that is none",
}


# ---- outside -------------------------------------------------------------------------------------------------------

_inside: _Inside


def start(sandbox: Sandbox, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Prepare this worker process, and `begin(*arguments)` in its sandbox; runs once, before its first call."""
    global _inside
    begin_worker()
    _inside = _Inside(sandbox)
    _inside.call(begin, arguments)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of ours in the sandbox; its annotation says what it returns."""
    return _inside.call(function, arguments)


class _Inside:
    """The process inside, seen from the worker that has started it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._wire, theirs = Pipe()
        told, tell = os.pipe()
        inside = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            sandbox.command(inside, told=tell),
            env=sandbox.environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(tell, theirs.fileno()),
        )
        os.close(tell)
        theirs.close()
        with open(told, "rb") as stream:  # noqa: PTH123 - a descriptor
            first = stream.read()
        try:
            self._wire.recv_bytes(len(_GREETING))
        except (EOFError, OSError):  # bubblewrap has said why
            self._end_likewise()
        # The sandbox's own list of processes, which shows no other; before the greeting it is the machine's.
        self._processes = Path(f"/proc/{json.loads(first)['child-pid']}/root/proc")
        self._wire.send(sandbox)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a function inside. This process ends where that one does, or uses more than it may."""
        try:
            self._wire.send((function, arguments))
            while not self._wire.poll(LOOK_S):
                self._look()
            return _type_of(function).validate_json(self._wire.recv_bytes(MOST_BYTES), strict=True)
        except (EOFError, ConnectionError):
            self._end_likewise()
        except (OSError, ValidationError):  # it is too long, or something else than was asked for
            self._end(NO_REPLY)

    def _look(self) -> None:
        """End the sandbox where it uses more than it may."""
        running = _running(self._processes)
        if len(running) > self._sandbox.processes:
            self._end(TOO_MANY_PROCESSES)
        if sum(map(_mapped, running)) > self._sandbox.memory_bytes < sum(map(_own, running)):
            self._end(TOO_MUCH_MEMORY)

    def _end(self, code: int) -> NoReturn:
        self._process.kill()  # and with it all in the sandbox
        os._exit(code)

    def _end_likewise(self) -> NoReturn:
        os._exit(self._process.wait() or NO_REPLY)


@cache
def _type_of(function: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function)["return"])


# ---- inside --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Carry out what comes, until the other end is gone."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # not for what the user's code starts
    wire = Connection(descriptor)
    wire.send_bytes(_GREETING)
    sandbox: Sandbox = wire.recv()
    sandbox.limit()
    stay: list[Path] | None = None
    while True:
        try:
            function, arguments = wire.recv()
        except EOFError:
            return
        value = function(*arguments)
        stay = _running(PROCESSES) if stay is None else stay
        if not getattr(value, "under_way", ()):
            _end_others(stay)
        text = json.dumps(value, default=dataclasses.asdict, ensure_ascii=False)
        wire.send_bytes(text.encode("utf-8", "replace"))


def _end_others(stay: list[Path]) -> None:
    """Kill whatever a call has started: some may start more meanwhile."""
    while others := set(_running(PROCESSES)) - {*stay}:
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


# ---- processes -----------------------------------------------------------------------------------------------------


def _running(processes: Path) -> list[Path]:
    """Return the folders of the processes that a `/proc` shows, without those that wait to be collected."""
    try:
        found = [entry for entry in processes.iterdir() if entry.name.isdigit()]
    except OSError:
        return []  # the sandbox has ended
    return [process for process in found if _state(process) not in "ZX"]


def _state(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def _mapped(process: Path) -> int:
    """Return the bytes of memory that a process has mapped; what it shares counts in full."""
    with contextlib.suppress(OSError):
        return int((process / "statm").read_text().split()[1]) * _PAGE
    return 0


def _own(process: Path) -> int:
    """Return the same, but of what it shares its part: to find that out takes a millisecond."""
    with contextlib.suppress(OSError):
        lines = (process / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return 0


if __name__ == "__main__":
    main()
