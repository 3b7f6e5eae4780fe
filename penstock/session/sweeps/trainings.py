"""The trainings of a sweep, each in a process of its own: it owns its engines, its main thread and its signals.

A process is a child flow run (penstock/cli/runs/swept.py) on the sweep's own Prefect server, below the task that began
it, and it lies below a keeper: if this process is killed, nothing of a training is left. One that is told to end writes
its summary first, as after Ctrl-C.

Left out: which trainings there are (plan.py) and what becomes of their results (penstock/tasks/sweep).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.session.sweeps.lanes import Lane
from penstock.usercode.kept import command_of, number_from
from penstock.usercode.trusted_models import KEPT

PROGRAM = "penstock.cli.runs.swept"
LOOK_S = 0.2  # between looks at what has ended
GRACE_S = 90.0  # for engines to end and a summary to be written
TAIL_LINES = 12


@dataclass(frozen=True)
class Running:
    """A training's process.

    Attributes:
        flow_run: id of its flow run.
        pid: of the training, below its keeper.
    """

    name: str
    flow_run: str
    lane: Lane
    keeper: subprocess.Popen[bytes]
    pid: int
    log: Path
    began: float  # time.monotonic


@dataclass(frozen=True)
class Ended:
    """A training that has ended: its exit code, negative for a signal, its seconds and the end of what it printed."""

    name: str
    flow_run: str
    code: int
    seconds: float
    tail: str


@dataclass
class Processes:
    """Those that run, and the lanes that are free."""

    free: list[Lane]
    running: list[Running] = field(default_factory=list)

    def start(self, name: str, flow_run: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start a training's process in a free lane.

        Args:
            log: gets what it prints.
            environment: variables over those of this process and below those of the lane.
        """
        lane = self.free.pop(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        # What Prefect told this process is of another flow run, but not whether a deployment's form asked for it.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__") or name in KEPT}
        number, given = os.pipe()
        with log.open("ab") as output:
            keeper = subprocess.Popen(
                command_of([sys.executable, "-P", "-m", PROGRAM, flow_run], [given], session=True),
                pass_fds=[given],
                env=ours | dict(environment) | dict(lane.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        os.close(given)
        self.running.append(Running(name, flow_run, lane, keeper, number_from(number), log, time.monotonic()))

    def ended(self) -> list[Ended]:
        """Return the trainings that have ended since the last look; their lanes are free."""
        over = [item for item in self.running if item.keeper.poll() is not None]
        self.running = [item for item in self.running if item not in over]
        self.free += [item.lane for item in over]
        return [_ended(item) for item in over]

    def end(self) -> list[Ended]:
        """End all that run, in order: each has time for its last words."""
        for item in self.running:
            with suppress(ProcessLookupError):
                os.kill(item.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for item in self.running:
            with suppress(subprocess.TimeoutExpired):
                item.keeper.wait(timeout=max(0.0, deadline - time.monotonic()))
            item.keeper.terminate()
            item.keeper.wait(timeout=GRACE_S)
        return self.ended()


@contextmanager
def processes(lanes: Sequence[Lane]) -> Iterator[Processes]:
    """Yield no process yet; however the block is left, none stays."""
    found = Processes(list(lanes))
    try:
        yield found
    finally:
        found.end()


def _ended(item: Running) -> Ended:
    tail = item.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return Ended(item.name, item.flow_run, item.keeper.returncode, time.monotonic() - item.began, "\n".join(tail))
