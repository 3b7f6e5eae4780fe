"""The terminal that commands write to: results on standard output, errors beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 160  # of tables in a pipe or a log; rich would fold them to 80

console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)

errors = Console(stderr=True)


def say(text: str) -> None:
    """Print text as it is: no markup, no colours of its own, not folded."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def short_path(folder: Path) -> str:
    """Return the path as it is shorter to type: from here, or from the root."""
    return min(os.path.relpath(folder), str(folder.absolute()), key=len)
