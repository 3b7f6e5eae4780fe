"""Rank processes on the machine of a host: what they are told, how they start, how they end.

A rank lives in its own session (Ctrl-C in the terminal reaches only the flow), reads nothing but what it is told at its
start, and writes to its own log file; it never holds the flow's stdout. Log files are appended to and rotated once, at
start: above 20 MB the old one becomes `.1`. Python's rotating handlers would miss what C libraries write.

Linux only, like the engines. Left out: their environment (environment.py), what one in reserve does (rank.py), and
when to do what (host.py).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.engines.groups.channel import Address
from penstock.usercode.kept import command_of, number_from

RESERVE = "reserve"  # argument of a rank that is in reserve
ROTATE_ABOVE_BYTES = 20 * 1024**2
TERM_GRACE_S = 2.0
REAP_TIMEOUT_S = 15.0  # longer than a keeper's patience
STACKS_WAIT_S = 1.0
_TAIL_BYTES = 8192

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankStart:
    """What a rank must know before it can dial. It comes through a pipe, because it holds the channel's keys.

    A process's first environment stays readable for as long as it lives, whatever the process does to its own copy.
    """

    group: str
    epoch: int
    rank: int
    world_size: int
    gpu: int | None
    worker: str
    address: Address
    environment: dict[str, str] = field(default_factory=dict)  # of one that began in reserve: what is new since then

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def take(cls) -> RankStart:
        """Read it from the standard input, of which it is the last line, and put the environment in force."""
        values = json.loads(sys.stdin.buffer.readline())
        os.environ |= values["environment"]
        return cls(**values | {"address": Address(**values["address"])})


@dataclass(frozen=True)
class Place:
    """Where a rank is to be, and with what around it.

    Attributes:
        environment: its own.
        folder: its working directory; None: this process's.
        ahead: module that one in reserve imports.
    """

    rank: int
    environment: dict[str, str]
    log_file: Path
    folder: Path | None
    ahead: str = ""


class RankProcess:
    """One spawned rank, below a keeper (penstock/usercode/keeper.py) that ends as it does once nothing of it is left.

    The keeper's exit is observed without reaping it, so that its pid goes to nobody else. Without a `start` it is one
    in reserve (rank.py), which becomes a rank later.
    """

    def __init__(self, place: Place, start: RankStart | None = None) -> None:
        self.place, self.rank, self.log_file = place, place.rank, place.log_file
        if start is not None and self.log_file.exists() and self.log_file.stat().st_size > ROTATE_ABOVE_BYTES:
            self.log_file.replace(self.log_file.with_name(self.log_file.name + ".1"))
        program = ["penstock.engines.groups.rank", *([RESERVE] if start is None else [])]
        told = place.ahead.encode() + b"\n" if start is None else start.to_json()
        with self.log_file.open("ab") as log:
            self._keeper, self._pid = start_kept(program, told, place.environment, log, place.folder, start is None)

    def become(self, start: RankStart, environment: dict[str, str]) -> None:
        """Let one in reserve be a rank, in `environment`."""
        changed = {name: value for name, value in environment.items() if self.place.environment.get(name) != value}
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError), self._keeper.stdin as pipe:  # of one that has ended: who watches it is told
            pipe.write(replace(start, environment=changed).to_json())

    def exit_reason(self) -> str | None:
        """How the rank ended, or None while it runs."""
        status = os.waitid(os.P_PID, self._keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"exited with code {status.si_status}"
        return f"exited with signal {status.si_status} ({signal.Signals(status.si_status).name})"

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank itself, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill_group(self) -> None:
        """Have the keeper SIGKILL the rank and every process that came of it. Does nothing once reaped."""
        if self._keeper.returncode is None:
            os.kill(self._keeper.pid, signal.SIGTERM)

    def reap(self) -> None:
        try:
            self._keeper.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.error("rank %d (pid %d) survives SIGKILL: a driver holds it", self.rank, self._pid)

    def log_size(self) -> int:
        return self.log_file.stat().st_size

    def log_tail(self, since: int = 0) -> str:
        """The end of the log file, at most 8 KB, nothing before byte `since`."""
        with self.log_file.open("rb") as log:
            log.seek(max(since, self.log_size() - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


def start_kept(
    program: Sequence[str],
    told: bytes,
    environment: dict[str, str],
    log: Any,
    folder: Path | None = None,
    waits: bool = False,
    kept: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program below a keeper, which ends as it does and with this process; return both, the second as a number.

    Args:
        program: a module, and its arguments.
        told: what it reads on its standard input.
        log: file or descriptor that gets what it prints.
        folder: its working directory; None: this process's.
        waits: whether it is told more later, through the keeper's `stdin`.
        kept: descriptors that both keep open.
    """
    number, given = os.pipe()
    keeper = subprocess.Popen(
        command_of([sys.executable, "-P", "-m", *program], [given], session=True),
        env=environment,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=[given, *kept],
    )
    os.close(given)
    assert keeper.stdin is not None
    with suppress(BrokenPipeError):  # of one that has ended: who watches it is told
        keeper.stdin.write(told)
        keeper.stdin.flush() if waits else keeper.stdin.close()
    return keeper, number_from(number)


def stacks(processes: Sequence[RankProcess]) -> dict[int, str]:
    """Return every rank's Python stacks, as its faulthandler writes them to its log on SIGUSR1. Takes one second."""
    before = [process.log_size() for process in processes]
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    return {process.rank: process.log_tail(since) for process, since in zip(processes, before, strict=True)}


def end(processes: Sequence[RankProcess], grace_s: float) -> None:
    """Wait `grace_s` for the ranks to leave, then SIGTERM, then SIGKILL; whatever happens, all are gone after."""
    try:
        if not _gone(processes, grace_s):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            _gone(processes, TERM_GRACE_S)
    finally:
        kill(processes)


def kill(processes: Sequence[RankProcess]) -> None:
    """SIGKILL every rank with all its children, and reap it."""
    for process in processes:
        process.kill_group()
    for process in processes:
        process.reap()


def _gone(processes: Sequence[RankProcess], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(process.exit_reason() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
