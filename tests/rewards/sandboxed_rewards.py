"""Reward functions that use what a sandbox does not give, as the response says; worker processes import them."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)  # of a sandbox"]
SERVER = subprocess.Popen(SLEEP) if __name__ == "sandboxed_rewards" else None  # that a module keeps


def act(response: str, place: str = "", secret: str = "PENSTOCK_TEST_SECRET") -> float:
    """Return 1 where the response's deed has worked."""
    what, _, argument = response.partition(":")
    match what:
        case "number":
            return float(argument)
        case "connect":
            with socket.create_connection(("127.0.0.1", int(argument)), timeout=5):
                return 1.0
        case "write":
            Path(argument).write_text("written")
            return 1.0
        case "temporary":
            path = Path("/tmp/penstock-of-a-sandbox")
            path.write_text("written")
            return float(path.read_text() == "written")
        case "read":
            return float(bool(Path(argument).read_text()))
        case "secret":
            return float(secret in os.environ)
        case "print":
            print(argument, flush=True)
            return 1.0
        case "allocate":
            return float(len(bytearray(int(argument))) > 0)
        case "share":  # memory that limits of one process do not count
            with mmap.mmap(-1, int(argument)) as memory:
                for at in range(0, int(argument), mmap.PAGESIZE):
                    memory[at] = 1
                time.sleep(1.0)
            return 1.0
        case "fork":
            return many_children(int(argument))
        case "leave":
            child = subprocess.Popen(SLEEP, start_new_session=True)
            while _command(Path("/proc") / str(child.pid)) != SLEEP:  # it begins a moment after it was started
                time.sleep(0.001)
            return 1.0
        case "count":
            return float(len(children_without_end()))
        case "server":
            return float(SERVER is not None and SERVER.poll() is None)
        case "forever":
            while True:
                subprocess.run(["true"], check=True)
        case "die":
            os._exit(7)
        case "lie":
            pretend()
        case "surrogate":
            raise ValueError("half a pair: \ud800")
    raise LookupError(what)


def children_without_end() -> set[int]:
    """Return the processes that this one can see and that run `SLEEP`."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _command(entry) == SLEEP}


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def many_children(count: int) -> float:
    """Start children that stay for a second, and wait for them."""
    pids = []
    for _ in range(count):
        if not (pid := os.fork()):
            time.sleep(1.0)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return 1.0


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(Path(os.environ["PENSTOCK_TEST_PLACE"], "escaped")),)


def evil() -> bytes:
    """Return bytes that make a folder where they are unpickled."""
    return pickle.dumps(_Evil())


def pretend() -> None:
    """Say on every descriptor what would run where it is unpickled."""
    body = evil()
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, len(body).to_bytes(4, "big") + body)
    time.sleep(600)
