"""The pages of the documentation, and what stands in their blocks of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

FIRST = (ROOT / "README.md", ROOT / "docs" / "operations.md")  # what a person reads first
OTHERS = (
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path not in FIRST),
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "deploy").rglob("*.md")),
)
PAGES = (*FIRST, *OTHERS)
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """Return what stands in the blocks of a page that name a language; those that name none hold commands."""
    return [text for named, text in BLOCK.findall(page) if named == language]


def command_lines(page: str) -> Iterator[str]:
    """Yield the lines of a page's commands; one that goes on behind a backslash is one line."""
    for block in blocks(page, ""):
        yield from filter(None, map(str.strip, re.sub(r"\\\n\s*", "", block).splitlines()))


def said_commands(page: str) -> Iterator[str]:
    """Yield the commands of Penstock and Prefect in a page's sentences, but for those that stand for any."""
    for text in re.findall(r"`((?:penstock|prefect) [^`]+)`", BLOCK.sub("", page)):
        if "COMMAND" not in text:
            yield text


def named(page: Path) -> str:
    """Return how a page is called in the repository."""
    return str(page.relative_to(ROOT))
