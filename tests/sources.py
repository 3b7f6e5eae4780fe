"""The project's own source files, for tests that look at all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def found_in(rooms: Sequence[str], find: Callable[[str, str], Iterable[str]]) -> set[str]:
    """Return what `find` finds in every source file of some rooms; it gets the file's path and its text."""
    paths = (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    return {line for path in paths for line in find(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))}
