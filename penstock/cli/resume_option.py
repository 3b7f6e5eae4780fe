"""The option `--resume`, which may stand without a path: then the newest run is meant (penstock/cli/runs/newest.py).

Typer has no option with an optional value, so a mark takes the path's place before it reads the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

OPTION = "--resume"
NEWEST = Path("?")  # the mark


class ResumesNewest(TyperCommand):
    """A command whose `--resume` may stand without a path; Typer has no option of that kind."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the mark where a path is missing."""
        return super().parse_args(ctx, with_mark(args))


def with_mark(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which every `--resume` has a value; a recipe or `key=value` behind it is none."""
    marked = list[str]()
    for at, argument in enumerate(arguments):
        marked.append(argument)
        if argument == OPTION and not _is_run(arguments[at + 1 : at + 2]):
            marked.append(str(NEWEST))
    return marked


def _is_run(following: Sequence[str]) -> bool:
    """Whether the word behind the option, if there is one, may be a run folder."""
    if not following or following[0].startswith("-"):
        return False
    path = Path(following[0])
    return path.is_dir() or not (path.is_file() or "=" in path.name)
