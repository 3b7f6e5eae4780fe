"""The trackers that `record.tracker` can name: a line for each of ours, and how a user's class is found.

Only this file knows which trackers there are. Left out: what a tracker does (penstock/trackers/tracker.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.base.errors import UserError
from penstock.trackers import mlflow, prometheus, tensorboard, wandb
from penstock.trackers.registry import Registry
from penstock.trackers.tracker import PAGES_PORT, Pages, Tracker
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
        ready: raises a `UserError` where it cannot be used here: its library is absent, its server does not answer;
            None: who begins a run finds out.
        keeps: whether it holds a run once the training has ended; `penstock sync` has nothing for one that does not.
        registry: returns its registry of models for the runs in a directory, None where no store is; None: it has no
            registry.
    """

    make: Callable[[Path], Tracker]
    pages: Callable[[Path, int], Pages | None] | None = None
    withheld: tuple[str, ...] = ()
    at_import: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], None] | None = None
    keeps: bool = True
    registry: Callable[[Path], Registry | None] | None = None


TRACKERS = {
    "mlflow": Kind(
        mlflow.made_for, mlflow.pages, mlflow.WITHHELD, mlflow.AT_IMPORT, mlflow.answers, registry=mlflow.registry
    ),
    "tensorboard": Kind(tensorboard.made_for, tensorboard.pages, ready=tensorboard.installed),
    "wandb": Kind(wandb.made_for, None, wandb.WITHHELD, wandb.AT_IMPORT, wandb.ready),
    "prometheus": Kind(prometheus.made_for, ready=prometheus.port_is_free, keeps=False),
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


def check_trackers(names: Sequence[str], setting: str = "record.tracker") -> None:
    """Check that there are trackers of these names, and that those of ours can be used here and now.

    Args:
        setting: key of the configuration that names them, for messages.

    Raises:
        UserError: the first that cannot.
    """
    for name in names:
        check_tracker(name, setting)
    for name in names:
        check_ready(name)


def check_ready(name: str) -> None:
    """Ask a tracker of ours for a sign of life; a user's tracker is asked once its run begins.

    Raises:
        UserError: it cannot be used here: its library is absent, its server does not answer.
    """
    if name in TRACKERS and (ready := TRACKERS[name].ready) is not None:
        ready()


def has_registry(name: str) -> bool:
    """Whether the tracker of a name keeps registered models."""
    return name in TRACKERS and TRACKERS[name].registry is not None


def find_registry(folder: Path) -> Registry | None:
    """Return the registry of models for the runs in a directory, that of the first tracker that has one; None: there
    is no store yet.

    Raises:
        UserError: its server does not answer.
    """
    kinds = (kind.registry for kind in TRACKERS.values() if kind.registry is not None)
    return next((made for kind in kinds if (made := kind(folder)) is not None), None)


def registry_in(folder: Path) -> Registry:
    """Return the registry of models for the runs in a directory.

    Raises:
        UserError: there is no store, or its server does not answer.
    """
    if (found := find_registry(folder)) is None:
        raise UserError(
            f"there is no registry of models in {folder}: no run was recorded there",
            "name the directory of the run folders whose models are meant, or their server (MLFLOW_TRACKING_URI)",
        )
    return found


def _incomplete(what: str, kind: str, lacking: list[str]) -> UserError:
    names = "', '".join(lacking)
    return UserError(f"{what} has no {kind} '{names}'.", "penstock/trackers/tracker.py says what a tracker has.")


def pages_in(folder: Path, port: int = PAGES_PORT) -> dict[int, Pages]:
    """Return the pages that show the runs in a directory, by port; none where no run is.

    Args:
        port: of the first tracker in the table that has pages; each further one's is the next.
    """
    having = (kind.pages for kind in TRACKERS.values() if kind.pages is not None)
    found = {number: pages(folder, number) for number, pages in enumerate(having, start=port)}
    return {number: pages for number, pages in found.items() if pages is not None}


def port_of_pages(name: str) -> int | None:
    """Return where `penstock ui` shows what the tracker of a name holds; None: it does not."""
    having = [known for known, kind in TRACKERS.items() if kind.pages is not None]
    return PAGES_PORT + having.index(name) if name in having else None


def keeps(name: str) -> bool:
    """Whether the tracker of a name holds a run once its training has ended."""
    return name not in TRACKERS or TRACKERS[name].keeps


def withheld() -> frozenset[str]:
    """Return the environment variables with passwords of trackers."""
    return frozenset(name for kind in TRACKERS.values() for name in kind.withheld)


def read_at_import() -> dict[str, str]:
    """Return the environment variables that the trackers' libraries read when they are imported, and their defaults."""
    return {name: value for kind in TRACKERS.values() for name, value in kind.at_import.items()}
