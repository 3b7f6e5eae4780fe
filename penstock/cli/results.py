"""What measurements leave: a result file that names the command that made it, and a sentence where no disk takes it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.errors import UserError

if TYPE_CHECKING:
    from penstock.benchmarks.reporting.result import BenchResult


def command() -> str:
    """Return this command as a shell takes it."""
    return shlex.join(["penstock", *sys.argv[1:]])


def write_measured(path: Path, result: BenchResult) -> None:
    """Write a result that the terminal has shown.

    Raises:
        UserError: the disk is full, or the place went while this was measured.
    """
    from penstock.benchmarks.reporting.result import write_result

    try:
        write_result(path, result)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise UserError(problem, "the figures are in the table above") from error
