"""What user code prints in worker processes goes to a file in the run folder: the terminal shows the progress.

Left out: the traceback of a module that does not load, which belongs on the terminal.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import threading
from pathlib import Path

LONGEST_BYTES = 20 << 20  # of the file, and of the older one beside it

_logger = logging.getLogger(__name__)


def print_to(path: str) -> None:
    """Append what this process, and what it starts, prints from now on to a file, line by line."""
    # Python escapes on standard error what no encoding has (half of a pair from a model), and so must this.
    sys.stdout = Path(path).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)


def errors_too() -> None:
    """Send standard error to the same file, with what libraries and C code write there."""
    os.dup2(1, 2)
    if isinstance(sys.stderr, io.TextIOWrapper):  # with PYTHONUNBUFFERED words go out one by one, of several workers
        sys.stderr.reconfigure(line_buffering=True, write_through=False)


class PrintLog:
    """The file of prints, as the training sees it: says once where it is, and keeps it short. Several threads may call.

    Args:
        path: of the file, to which earlier attempts may have written; its folder is made.
        what: whose prints they are, for the message.
    """

    def __init__(self, path: Path, what: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._what = path, what
        self._told, self._looking = False, threading.Lock()
        self._before = path.stat().st_size if path.is_file() else 0

    def look(self) -> None:
        """Warn at the first output of this training; move a long file's content aside."""
        with self._looking:
            size = self.path.stat().st_size if self.path.is_file() else 0
            if size > self._before and not self._told:
                self._told = True
                _logger.warning("%s prints; its output is in %s", self._what, self.path)
            if size > LONGEST_BYTES:  # the workers have it open to append: it is emptied, not replaced
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
                os.truncate(self.path, 0)

    def close(self) -> None:
        """Remove the file if it is empty; called once the workers have ended."""
        if self.path.is_file() and not self.path.stat().st_size:
            self.path.unlink()
