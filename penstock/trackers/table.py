"""The trackers that `record.tracker` can name: a line for each of ours, and how a user's class is found.

Only this file knows which trackers there are. Left out: what a tracker does (penstock/trackers/tracker.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.base.errors import UserError
from penstock.trackers import mlflow
from penstock.trackers.tracker import Pages, Tracker
from penstock.usercode.imports import import_named, nearest

METHODS = [name for name, value in vars(Tracker).items() if inspect.isfunction(value) and not name.startswith("_")]
TEXTS = [name for name, value in vars(Tracker).items() if isinstance(value, property)]

_EXAMPLE = "my_tracker:Lines"


@dataclass(frozen=True)
class Kind:
    """A tracker of ours.

    Attributes:
        make: makes it for the runs in a directory.
        pages: returns what `penstock ui` starts for a directory and a port, None where no run is; None: it has no
            pages of its own.
        withheld: environment variables with its passwords, which ranks do not get.
        at_import: environment variables that its library reads when it is imported, with what they are unless the user
            has set them.
        answers: raises a `UserError` where its server does not answer; None: who begins a run finds out.
    """

    make: Callable[[Path], Tracker]
    pages: Callable[[Path, int], Pages | None] | None = None
    withheld: tuple[str, ...] = ()
    at_import: Mapping[str, str] = field(default_factory=dict)
    answers: Callable[[], None] | None = None


TRACKERS = {
    "mlflow": Kind(mlflow.made_for, mlflow.pages, mlflow.WITHHELD, mlflow.AT_IMPORT, mlflow.answers),
}


def make_tracker(name: str, folder: Path) -> Tracker:
    """Return the tracker of a name for the runs in `folder`; no server is asked.

    Raises:
        UserError: there is none of that name, or a user's class cannot be used.
    """
    tracker = check_tracker(name)(folder)
    if lacking := [text for text in TEXTS if not isinstance(getattr(tracker, text, None), str)]:
        raise _incomplete(f"the tracker '{name}'", "text", lacking)
    return tracker


def check_tracker(name: str, setting: str = "record.tracker") -> Callable[[Path], Tracker]:
    """Return what makes the tracker of a name for the runs in a directory.

    Args:
        setting: key of the configuration that names it, for messages.

    Raises:
        UserError: there is none of that name, or a user's class is not one.
    """
    if name in TRACKERS:
        return TRACKERS[name].make
    if ":" not in name:
        raise UserError(
            f"{setting} '{name}' is no tracker{nearest(name, TRACKERS)}.",
            f"There are: {', '.join(TRACKERS)}. One of yours is named as 'module:Class', for example {_EXAMPLE}.",
        )
    found = import_named(setting, name, "class", _EXAMPLE)
    if lacking := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise _incomplete(f"{setting} '{name}'", "method", lacking)
    return found


def check_answers(name: str) -> None:
    """Ask the server of a tracker of ours for a sign of life; a user's tracker is asked once its run begins.

    Raises:
        UserError: it does not answer.
    """
    if name in TRACKERS and (answers := TRACKERS[name].answers) is not None:
        answers()


def _incomplete(what: str, kind: str, lacking: list[str]) -> UserError:
    names = "', '".join(lacking)
    return UserError(f"{what} has no {kind} '{names}'.", "penstock/trackers/tracker.py says what a tracker has.")


def pages_in(folder: Path, port: int) -> Pages | None:
    """Return the pages that show the runs in a directory, None if there are none."""
    found = (kind.pages(folder, port) for kind in TRACKERS.values() if kind.pages is not None)
    return next((pages for pages in found if pages is not None), None)


def has_pages(name: str) -> bool:
    """Whether `penstock ui` shows what the tracker of a name holds."""
    return name in TRACKERS and TRACKERS[name].pages is not None


def withheld() -> frozenset[str]:
    """Return the environment variables with passwords of trackers."""
    return frozenset(name for kind in TRACKERS.values() for name in kind.withheld)


def read_at_import() -> dict[str, str]:
    """Return the environment variables that the trackers' libraries read when they are imported, and their defaults."""
    return {name: value for kind in TRACKERS.values() for name, value in kind.at_import.items()}
