"""The processes of a training on this machine, told apart by what they are for.

A word in the environment marks them: whatever a training starts inherits it, also what has lost its parent. Left out:
processes on other machines, and what cleared its environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

MARK = "PENSTOCK_CHAOS"

Kind = Literal[
    "flow",
    "host",
    "rank",
    "rank that was in reserve",
    "keeper",
    "user's code",
    "Prefect's server",
    "shell beside it",
    "Python's resource tracker",
    "other",
]

# Words of a command line by which a kind is known; the first that is found counts.
WORDS: dict[str, Kind] = {
    "keeper.py": "keeper",
    "penstock.engines.groups.host": "host",
    "penstock.engines.groups.rank reserve": "rank that was in reserve",  # or still is
    "penstock.engines.groups.rank": "rank",
    "multiprocessing.spawn": "user's code",
    "multiprocessing.resource_tracker": "Python's resource tracker",
    "prefect.server": "Prefect's server",
    "read -r _": "shell beside it",
    "penstock.cli.main": "flow",
}


@dataclass(frozen=True)
class Found:
    """A process of a training."""

    kind: Kind
    process: psutil.Process


def processes_of(mark: str) -> list[Found]:
    """Return the living processes that a training with this mark has started, itself among them."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
            if marked and (words := process.cmdline()):
                found.append(Found(kind_of(words), process))
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended, or is another user's
            continue
    return found


def kind_of(command_line: Sequence[str]) -> Kind:
    """Return what a process is for, by its command line."""
    text = " ".join(command_line)
    return next((kind for word, kind in WORDS.items() if word in text), "other")
