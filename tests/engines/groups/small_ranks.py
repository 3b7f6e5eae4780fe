"""A small worker for tests of engine groups, which do not care what a command means, and groups of it."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.engines.groups.channel import Tell
from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from tests.processes import leave_children
from tests.waiting import came_true


class SmallWorker:
    """The rank's side of these tests: one method per command."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        self.rank, self.world_size, self.gpu = rank, world_size, gpu
        self.handled = 0
        self.tidied: list[str] = []
        self.awaited: Path | None = None
        self.broken = False

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | Waiting:
        self.handled += 1
        self.tell = tell
        result: dict[str, Any] | Waiting = getattr(self, command)(**arguments)
        return result

    def after_reply(self) -> None:
        if self.broken:
            raise OSError("the device answers no more")
        if self.awaited is not None:
            came_true(self.awaited.exists, 20)
            self.tidied.append(self.awaited.read_text())
            self.awaited = None

    def close(self) -> None:
        atexit.register(print, "taken apart")
        print("closed in order")

    def echo(self, **arguments: Any) -> dict[str, Any]:
        return arguments | {"rank": self.rank, "world_size": self.world_size, "gpu": self.gpu, "pid": os.getpid()}

    def count(self) -> dict[str, Any]:
        return {"handled": self.handled}

    def tidy_afterwards(self, path: str) -> dict[str, Any]:
        self.awaited = Path(path)
        return {"tidied": list(self.tidied)}

    def break_slowly(self) -> dict[str, Any]:
        self.broken = True
        if self.rank == 0:
            raise ArithmeticError("the loss is not finite")
        return self.sleep(4.0)

    def sleep(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {}

    def environment(self, names: list[str]) -> dict[str, Any]:
        return {name: os.environ.get(name) for name in names}

    def fail(self, rank: int) -> dict[str, Any]:
        if self.rank == rank:
            raise ArithmeticError("the loss is not finite")
        return {}

    def run_short(self, rank: int) -> dict[str, Any]:
        if self.rank == rank:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {}

    def refuse(self) -> dict[str, Any]:
        raise UserError("the recipe asks for too much", "ask for less")

    def leave(self, rank: int) -> dict[str, Any]:
        if self.rank == rank:
            sys.exit(3)
        return self.ponder_for_ever()

    def ponder_for_ever(self) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    def hold_the_lock(self, seconds: int) -> dict[str, Any]:
        noted: list[float] = []
        other = threading.Timer(0.5, lambda: noted.append(time.monotonic()))
        other.start()
        ctypes.PyDLL(None).sleep(seconds)  # which does not let go of the interpreter lock
        ended = time.monotonic()
        other.join()
        return {"others_ran": noted[0] < ended - 0.1}

    def leave_children(self, folder: str) -> dict[str, Any]:
        leave_children(folder)
        return {}

    def count_aloud(self, to: int) -> dict[str, Any]:
        for number in range(to):
            self.tell({"rank": self.rank, "number": number})
        return {"rank": self.rank, "counted": to}

    def reply_after(self, path: str) -> dict[str, Any]:
        if self.rank == 1:
            came_true(Path(path).exists, 20)
        return {"rank": self.rank}

    def unpackable(self) -> dict[str, Any]:
        return {"value": object()}

    def wait_for(self, path: str, fails: bool = False) -> Waiting:
        return Waiting(Path(path), fails, self.rank)


class Waiting:
    """A command that is pending until a file is there; commands that echo or fail may begin meanwhile."""

    def __init__(self, path: Path, fails: bool, rank: int) -> None:
        self._path, self._fails, self._rank = path, fails, rank
        self.result: dict[str, Any] | None = None

    def admitted(self, commands: Sequence[str]) -> int:
        return len(list(takewhile(lambda name: name in ("echo", "fail", "wait_for"), commands)))

    def step(self) -> None:
        time.sleep(0.001)
        if self._path.exists():
            if self._fails:
                raise ArithmeticError("the loss is not finite")
            self.result = {"rank": self._rank, "text": self._path.read_text()}


class OutOfMemoryError(RuntimeError):
    """As PyTorch's is called."""


class UnbuildableWorker(SmallWorker):
    """Fails as a missing checkpoint would."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        raise OSError("no weights here")


class SlowWorker(SmallWorker):
    """Rank 1 never becomes ready."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(rank, world_size, gpu)
        if rank == 1:
            self.ponder_for_ever()


def spec(folder: Path, **changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "name": "main",
        "roles": ("actor",),
        "devices": (RankDevice(None), RankDevice(None)),
        "log_dir": folder,
        "start_timeout_s": 60.0,
        "command_timeout_s": 60.0,
        "heartbeat_timeout_s": 60.0,
        "worker": f"{__name__}:SmallWorker",
    }
    return GroupSpec(**values | changes)


def pids_of(group: EngineGroup) -> list[int]:
    return [reply["pid"] for reply in group.call("echo", key="pids")]
