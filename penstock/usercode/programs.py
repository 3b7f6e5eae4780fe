"""A Python program that a model wrote, run once: in a process of its own, within bounds, and judged by tests.

Time, memory and what is written have bounds, and with all that it has started the process is gone afterwards. What else
it may see and use, the files and the network above all, is the business of the sandbox that the worker is in.

Left out: other languages. Tests that run behind a program are in its process, so one that searches its interpreter for
what they expect can find it; cases of input and output cannot be forged.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
WRITTEN_MIB = 16  # of one file, what is printed included
PROGRAM = "program.py"


@dataclass(frozen=True)
class Bounds:
    """What a run may take: seconds, and MiB of memory of each of its processes."""

    seconds: float
    memory_mib: int

    def set(self) -> None:
        """Bind this process, and all that it will start."""
        for what, most in (
            (resource.RLIMIT_AS, self.memory_mib * MIB),
            (resource.RLIMIT_FSIZE, WRITTEN_MIB * MIB),
            (resource.RLIMIT_CPU, int(self.seconds) + 1),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))


def run_program(code: str, folder: Path, bounds: Bounds) -> tuple[int | None, str]:
    """Run a program in a folder; return its exit status, None where time was up, and all that it printed."""
    return _run(["-"], code, folder, bounds, subprocess.STDOUT)


def answer_of(code: str, given: str, folder: Path, bounds: Bounds) -> tuple[int | None, str]:
    """Run a program that reads `given`; return its exit status, None where time was up, and its standard output."""
    (folder / PROGRAM).write_text(code, encoding="utf-8")
    return _run([PROGRAM], given, folder, bounds, subprocess.DEVNULL)


def passes(code: str, tests: str, folder: Path, bounds: Bounds) -> bool:
    """Whether a program and the tests behind it come to their end.

    Only who comes to the end of the tests knows what to print there: a program that leaves before has not passed them.
    """
    passed = secrets.token_hex(16)
    status, printed = run_program(f"{code}\n\n{tests}\nprint()\nprint({passed!r})\n", folder, bounds)
    return status == 0 and printed.rstrip("\n").endswith(passed)


def _run(arguments: list[str], given: str, folder: Path, bounds: Bounds, errors: int) -> tuple[int | None, str]:
    with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as output:
        read.write(given.encode(errors="replace"))
        read.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", *arguments],
            stdin=read,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder)},
            start_new_session=True,
            preexec_fn=bounds.set,
        )
        try:
            status = process.wait(bounds.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read(WRITTEN_MIB * MIB).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a run: it, and what it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
