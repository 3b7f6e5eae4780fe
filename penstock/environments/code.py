"""Python that the policy writes, as a tool; the tests of a problem may be its reward.

    environment: {type: "penstock.environments.code:Python", settings: {tests: tests}, sandbox: {}, max_turns: 6}

Each run is a process of its own, with a bound on its time, its memory and what it writes; with all that it has started
it is gone afterwards. What else it may see and use, the files and the network above all, is the business of the sandbox
that the environment's worker is in, without which this is refused.

Left out: other languages; state between two runs, but for files. A run is in the worker's sandbox and might end it,
which fails the worker's episodes.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

MIB = 1 << 20
WRITTEN_MIB = 16  # of one file, what is printed included
FULL_REWARD = 1.0


class Python:
    """One problem, with as many runs as the policy asks for.

    Args:
        seconds: of a run.
        memory_mib: of a process.
        shown: characters that the policy sees of what a run prints; of more, the beginning and the end.
        tests: column with a program that is run behind the last one; the reward is 1 where it comes to its end, else 0.
            None: no reward of its own.
    """

    needs_sandbox = True

    def __init__(
        self, seconds: float = 5.0, memory_mib: int = 512, shown: int = 2000, tests: str | None = None
    ) -> None:
        self._seconds, self._memory_mib, self._shown, self._column = seconds, memory_mib, shown, tests
        self._last, self._tests = "", ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def reset(self, **row: Any) -> None:
        """Begin with an empty folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="run-")  # removed with this object
        self._last = ""
        self._tests = "" if self._column is None else str(row[self._column])

    def run_python(self, code: str) -> str:
        """
        Run a Python program and see what it prints. Files that it writes are there for the next one.

        Args:
            code: the whole program
        """
        self._last = code
        status, printed = self._run(code)
        if status == 0:
            return printed or "(nothing printed)"
        return f"{printed}\n({_why(status, self._seconds)})".strip()

    def get_reward(self) -> float | None:
        """Run the last program once more with the tests behind it.

        Only who comes to their end knows what to print there: a program that leaves before has not passed them.
        """
        if self._column is None:
            return None
        if not self._last:
            return 0.0
        assert self._folder is not None
        shutil.rmtree(self._folder.name)
        Path(self._folder.name).mkdir()
        passed = secrets.token_hex(16)
        status, printed = self._run(f"{self._last}\n\n{self._tests}\nprint()\nprint({passed!r})\n")
        return FULL_REWARD if status == 0 and printed.endswith(passed) else 0.0

    def _run(self, code: str) -> tuple[int | None, str]:
        """Return the exit status, None where time was up, and what was printed."""
        assert self._folder is not None
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as output:
            program.write(code.encode())
            program.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-"],
                stdin=program,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
                env={"PATH": os.environ.get("PATH", ""), "HOME": self._folder.name},
                start_new_session=True,
                preexec_fn=self._limit,
            )
            try:
                status = process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            output.seek(0)
            return status, self._clipped(output.read(WRITTEN_MIB * MIB).decode(errors="replace"))

    def _limit(self) -> None:
        for what, most in (
            (resource.RLIMIT_AS, self._memory_mib * MIB),
            (resource.RLIMIT_FSIZE, WRITTEN_MIB * MIB),
            (resource.RLIMIT_CPU, int(self._seconds) + 1),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))

    def _clipped(self, text: str) -> str:
        if len(text) <= self._shown:
            return text.rstrip("\n")
        half = self._shown // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}".rstrip("\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a run: it, and what it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(status: int | None, seconds: float) -> str:
    if status is None:
        return f"ended after {seconds:g} s"
    return f"exit status {status}" if status > 0 else f"ended by signal {-status}"
