"""Python that the policy writes, as a tool; the tests of a problem may be its reward.

    environment: {type: "penstock.environments.code:Python", settings: {tests: tests}, sandbox: {}, max_turns: 6}

Each run is a process of its own (penstock/usercode/programs.py), in the sandbox of the environment's worker, without
which this is refused.

Left out: state between two runs, but for files. A run is in the worker's sandbox and might end it, which fails the
worker's episodes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from penstock.usercode.programs import Bounds, passes, run_program

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
        self._bounds, self._shown, self._column = Bounds(seconds, memory_mib), shown, tests
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
        assert self._folder is not None
        self._last = code
        status, printed = run_program(code, Path(self._folder.name), self._bounds)
        printed = self._clipped(printed)
        if status == 0:
            return printed or "(nothing printed)"
        return f"{printed}\n({_why(status, self._bounds.seconds)})".strip()

    def get_reward(self) -> float | None:
        """Run the last program once more, in an empty folder, with the tests behind it."""
        if self._column is None:
            return None
        if not self._last:
            return 0.0
        assert self._folder is not None
        shutil.rmtree(self._folder.name)
        Path(self._folder.name).mkdir()
        folder = Path(self._folder.name)
        return FULL_REWARD if passes(self._last, self._tests, folder, self._bounds) else 0.0

    def _clipped(self, text: str) -> str:
        if len(text) <= self._shown:
            return text.rstrip("\n")
        half = self._shown // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}".rstrip("\n")


def _why(status: int | None, seconds: float) -> str:
    if status is None:
        return f"ended after {seconds:g} s"
    return f"exit status {status}" if status > 0 else f"ended by signal {-status}"
