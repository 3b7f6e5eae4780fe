"""What a tracker is, and what it is given: there a run's figures, tables and files can be looked at besides its folder.

The run folder is the truth and a tracker a view of it. `Delivery` (penstock/trackers/delivery.py) decides what a
tracker gets and asks what it holds. So a tracker keeps and answers, and remembers nothing about attempts and resumes.

A tracker of ours is a file here and a line in penstock/trackers/table.py; one of the user's is a class that
`record.tracker` names as `module:Class`, made with the directory of the run folders. Left out: comparing runs
(penstock/reports/comparing/).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["completed", "failed", "cancelled"]
"""How a run ended; cancelled: a person or the scheduler stopped it."""

ITERATION = "iteration"
"""The figure that comes with the first figures of each iteration: a tracker that holds it holds the iteration."""


PARENT = "penstock.parent"
"""Tag with what the store calls the run that another one is a part of, as a training is of its sweep."""


@dataclass(frozen=True)
class NewRun:
    """A run to begin: its name, the group of runs that it is compared with, and tags."""

    name: str
    experiment: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Figures:
    """Figures of an iteration, or of a step of offline training; a value may be NaN or infinite."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """Rows to look at; the JSON file has `columns`, a list of names, and `data`, a list of values per row.

    Attributes:
        name: under which the tracker keeps the file, e.g. "samples/000012.json".
        path: of the file, in the run folder.
    """

    name: str
    path: Path

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows, as values by column."""
        content = json.loads(self.path.read_text(encoding="utf-8"))
        return [dict(zip(content["columns"], values, strict=True)) for values in content["data"]]


@dataclass(frozen=True)
class Artifact:
    """A file, all files of a folder, or a text.

    Attributes:
        name: under which the tracker keeps the file, the text or what the folder holds.
        content: path of the file or folder; or the text itself.
    """

    name: str
    content: Path | str


@dataclass(frozen=True)
class Model:
    """A model in a folder, to be known by reference; `params` say where it comes from."""

    name: str
    folder: Path
    params: Mapping[str, str]


PAGES_PORT = 5000
"""Where `penstock ui` serves a tracker's pages unless another port is named; those of a further one at the next."""


@dataclass(frozen=True)
class Pages:
    """A server for the pages of past runs.

    Attributes:
        label: the tracker's name, for people.
        address: of the page to begin with.
        module: arguments for `python -m`, without a password.
        environment: variables that it needs besides.
    """

    label: str
    address: str
    module: list[str]
    environment: Mapping[str, str]


class Tracker(Protocol):
    """One run in a tracker's store. Making one asks no server; `open` or `find` comes before everything else.

    A method raises `UserError` for what the user has to do, and anything else where the store does not take or answer
    something: a training goes on then, and tries again later, on a thread of its own. It calls one method at a time.
    """

    @property
    def label(self) -> str:
        """Return the tracker's name, for people."""

    @property
    def address(self) -> str:
        """Return where the store is, without a password."""

    @property
    def run(self) -> str:
        """Return what the store calls the run; empty before there is one."""

    @property
    def page(self) -> str:
        """Return the address of the run's page, without a password; empty if it has none. Asks no server."""

    def open(self, new: NewRun) -> str:
        """Begin a run, which is running from now on, and return what the store calls it."""

    def find(self, run: str) -> bool:
        """Be about a run that was begun earlier; return whether the store holds it."""

    def resume(self) -> None:
        """Let a run that was found be running again."""

    def configure(self, settings: Mapping[str, str]) -> bool:
        """Keep settings by dotted key, for a run that has them what a resume changed; return whether that is news."""

    def log(self, figures: Sequence[Figures]) -> None:
        """Keep figures, none of which the run holds at that step."""

    def logged(self, figure: str) -> set[int]:
        """Return the steps at which the run holds a figure."""

    def logged_through(self) -> int:
        """Return the last step at which the run holds the figure `ITERATION`, -1 if none."""

    def table(self, table: Table) -> None:
        """Keep a table, in place of one of the same name."""

    def artifact(self, artifact: Artifact) -> None:
        """Keep a file, a folder's content or a text, in place of what has the same name."""

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        """Return the names of tables and artifacts that the run does not hold as these files are."""

    def model(self, model: Model) -> str | None:
        """Keep a model of the run by reference and return what the store calls it; None if it keeps no models."""

    def status(self) -> Status | None:
        """Return how the run ended; None if it is running."""

    def close(self, status: Status, at_s: float) -> None:
        """End the run as of a time, in seconds since the epoch."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested config as dotted keys and JSON values; a schedule `{0: 1, 100: 4}` stays one value."""
    settings: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not all(str(step).isdigit() for step in value):
            settings |= flatten(value, f"{name}.")
        else:
            settings[name] = value if isinstance(value, str) else json.dumps(value)
    return settings


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of the same columns as the text of a table's file."""
    import pandas as pd

    text: str = pd.DataFrame(list(rows)).to_json(orient="split", index=False, date_format="iso")
    return text
