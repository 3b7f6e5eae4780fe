"""Commands of Penstock in processes of their own, several at a time, each in a lane that has stores of its own.

Temporary Prefect servers that share a database wait for each other, and so do runs that share MLflow's. A lane keeps
both for the runs that follow each other in it, so that they are made once per lane. The lanes share the cores and the
GPUs: where there are several, a lane does not wait until another one has no GPU.

Left out: what the commands do, and which GPU they take (all that are visible).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.session.machines.claims import FOLDER as CLAIMS

LOOK_S = 0.2  # between looks at what has ended
TAIL_LINES = 15


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its name, its exit code, its wall-clock seconds and the end of what it printed."""

    name: str
    code: int
    seconds: float
    tail: str


@dataclass(frozen=True)
class _Running:
    name: str
    process: subprocess.Popen[bytes]
    begin: float
    printed: Path


def side_by_side(
    commands: Mapping[str, Sequence[str]], lanes: int, folder: Path, environment: Mapping[str, str]
) -> Iterator[Ended]:
    """Run `penstock` with each of the argument lists, at most `lanes` at a time; yield them as they end.

    Leaving the iteration early, also by an error or a signal, ends those that still run.

    Args:
        commands: arguments by a name of their own.
        folder: receives the lanes' stores, and what each command prints as `<name>.log`.
        environment: variables over those of this process.
    """
    waiting, running = list(commands.items()), dict[int, _Running]()
    shared = _without_prefect(os.environ) | dict(environment) | _threads(lanes)
    with _ended_with_the_block(running):
        while waiting or running:
            for lane in range(lanes):
                if lane not in running and waiting:
                    name, arguments = waiting.pop(0)
                    own = _stores(folder / f"lane-{lane}", lanes > 1)
                    running[lane] = _start(name, arguments, shared | own, folder)
            time.sleep(LOOK_S)
            for lane in [lane for lane, item in running.items() if item.process.poll() is not None]:
                yield _ended(running.pop(lane))


def _start(name: str, arguments: Sequence[str], environment: dict[str, str], folder: Path) -> _Running:
    printed = folder / f"{name}.log"
    with printed.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return _Running(name, process, time.monotonic(), printed)


def _ended(item: _Running) -> Ended:
    tail = item.printed.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return Ended(item.name, item.process.returncode, time.monotonic() - item.begin, "\n".join(tail))


def _threads(lanes: int) -> dict[str, str]:
    cores = str(max(1, len(os.sched_getaffinity(0)) // lanes))
    return dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), cores)


def _without_prefect(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which no server of the user's is told of these runs."""
    return {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}


def _stores(lane: Path, beside_others: bool) -> dict[str, str]:
    """Return where a lane's Prefect and MLflow keep what they keep, and who is told which GPU is whose."""
    lane.mkdir(exist_ok=True)
    claims = {CLAIMS: str(lane / "gpus")} if beside_others else {}
    return {"PREFECT_HOME": str(lane / "prefect"), "MLFLOW_TRACKING_URI": f"sqlite:///{lane / 'mlflow.db'}"} | claims


@contextmanager
def _ended_with_the_block(running: Mapping[int, _Running]) -> Iterator[None]:
    """End what still runs when the block is left; SIGTERM becomes an exit that leaves it in order."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for item in running.values():
            item.process.terminate()
        for item in running.values():
            item.process.wait()


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
