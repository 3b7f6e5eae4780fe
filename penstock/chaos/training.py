"""A training as a person starts it, `penstock train --keep-alive`, whose processes chaos may kill.

Left out: what is killed and when (penstock/chaos/kills.py).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from penstock.chaos.processes import MARK, Found, processes_of
from penstock.state.digests import unsealed
from penstock.state.run_folder import RunFolder


class LastIteration:
    """The last iteration of a growing `metrics.jsonl`: each look reads what is new.

    A resume replaces the file, which is then read from its beginning. A line that is damaged is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: BinaryIO | None = None  # kept open: no other file gets its number
        self._place, self._number = 0, -1

    def look(self) -> int:
        """Return the last iteration that is recorded; -1: none."""
        if self._stream is None or self._is_another(self._stream):
            self.close()
            if not self._path.exists():
                return -1
            self._stream = self._path.open("rb")
        whole, end, _ = self._stream.read().rpartition(b"\n")
        self._stream.seek(self._place + len(whole) + len(end))
        self._place = self._stream.tell()
        self._number = max([self._number, *map(_iteration, whole.splitlines())])
        return self._number

    def close(self) -> None:
        """Let go of the file."""
        if self._stream is not None:
            self._stream.close()
        self._stream, self._place, self._number = None, 0, -1

    def _is_another(self, stream: BinaryIO) -> bool:
        """Whether the file was replaced, or lines were taken back."""
        if not self._path.exists():
            return True
        now = self._path.stat()
        return os.fstat(stream.fileno()).st_ino != now.st_ino or now.st_size < self._place


def _iteration(line: bytes) -> int:
    try:
        return int(unsealed(line.decode())["iteration"])
    except (ValueError, RecursionError):
        return -1


@dataclass
class Training:
    """A run of a recipe.

    Attributes:
        recipe: path of the recipe; `overrides` are laid over it.
        run: its folder, which also gets what the command prints, beside it.
        mark: in the environment of all its processes.
        command: the process that waits beside the training.
        last: looks at what it records.
    """

    recipe: Path
    overrides: Sequence[str]
    run: RunFolder
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    command: subprocess.Popen[bytes] | None = None
    last: LastIteration = field(init=False)

    def __post_init__(self) -> None:
        self.last = LastIteration(self.run.metrics)

    @property
    def log(self) -> Path:
        """What the command prints."""
        return self.run.path.with_suffix(".log")

    def start(self) -> None:
        """Begin the run."""
        words = ["train", str(self.recipe), *self.overrides, "--run", str(self.run.path), "--keep-alive"]
        with self.log.open("ab") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", *words],
                env=os.environ | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def exit_code(self) -> int | None:
        """How the command ended; None: it has not."""
        assert self.command is not None
        return self.command.poll()

    @property
    def iteration(self) -> int:
        """The last iteration that is recorded; -1: none, not even the evaluation before the first."""
        return self.last.look()

    def processes(self) -> list[Found]:
        """Return what lives of it, without the command."""
        assert self.command is not None
        return [found for found in processes_of(self.mark) if found.process.pid != self.command.pid]

    def end(self) -> None:
        """Kill what lives of it, the command first."""
        assert self.command is not None
        self.command.kill()
        self.command.wait()
        for found in self.processes():
            with suppress(psutil.NoSuchProcess):
                found.process.kill()

    def last_words(self, lines: int = 5) -> str:
        """Return the end of what the command printed."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
