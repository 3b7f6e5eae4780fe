"""A training that is started again with `--resume` when its process is killed: the command waits beside it.

Lost ranks and hosts the training replaces by itself (penstock/flows/parts/recovery.py). What nothing inside survives is
the end of the flow's own process, by a kernel that is out of memory, say. An exit code is no such end: the training has
said why. This process imports nothing of the training, so little can befall it; if something does, the training ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.cli.terminal import errors
from penstock.state.events import append_flow_lost
from penstock.state.run_folder import RunFolder
from penstock.usercode.kept import command_of, number_from

ASKED_FOR = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # ends that somebody wants
PROGRAM = (sys.executable, "-m", "penstock.cli.main")


def kept_alive(arguments: Sequence[str], folder: Path, restarts: int, window_s: float) -> int:
    """Run a command that trains until it ends by itself; return its exit code.

    Args:
        arguments: of the command, which trains in `folder`.
        folder: of the run; gets an event for each end that nobody wanted.
        restarts: ends within `window_s`, seconds, after which it is started again.
    """
    run, going_on, ends = RunFolder(folder), ["train", "--resume", str(folder)], list[float]()
    began_anew = "--resume" not in arguments
    while True:
        code = _ended([*PROGRAM, *arguments])
        if code >= 0 or -code in ASKED_FOR:
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        ends = [at for at in ends if now - at <= window_s] + [now]
        told = f"the training's process ended by signal {-code} ({signal.Signals(-code).name})"
        if len(ends) > restarts:
            errors.print(f"{told}, {len(ends)} times within {window_s:g} s: 'penstock {' '.join(going_on)}' goes on")
            return 128 - code
        if run.manifest.is_file():
            append_flow_lost(run, told)
            arguments = going_on
        elif began_anew:  # there is nothing to go on with yet
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        errors.print(f"{told}; it is started again")


def _ended(command: Sequence[str]) -> int:
    """Run a command until nothing of it is left; return its exit code, negative where a signal has ended it."""
    number, given = os.pipe()
    with subprocess.Popen(command_of(command, [given]), pass_fds=[given]) as keeper:
        os.close(given)
        with _handing_on(number_from(number)):
            return keeper.wait()


@contextmanager
def _handing_on(process: int) -> Iterator[None]:
    """Let a process answer Ctrl-C, which reaches it as well, and SIGTERM, which is handed on."""

    def hand_on(number: int, _: object) -> None:
        if number != signal.SIGINT:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    before = {number: signal.signal(number, hand_on) for number in ASKED_FOR}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
