"""What a model registry is: versions of a model under one name, known by reference; `models:/NAME@best` is one of them.

A version says in which folder its weights lie, what they are (a digest), and where they come from; nothing is copied.
So a folder that is gone, or holds other weights by now, is told and not used. `latest` is always the newest version,
as MLflow has it, which lets nobody set an alias of that name; `best` is an alias that moves when a version is promoted
(penstock/session/registry). Penstock adds versions and moves `best`, and deletes nothing.

Left out: which tracker has a registry (penstock/trackers/table.py), what a version says of a run
(penstock/session/registry/registering.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.base.errors import UserError
from penstock.base.files import for_each_file, sha256
from penstock.base.names import nearest_name

SCHEME = "models:/"
BEST, LATEST = "best", "latest"

# What a version says of itself, as tags.
FOLDER = "penstock.folder"
RUN = "penstock.run"
ITERATION = "penstock.iteration"
WEIGHTS = "penstock.weights"
DATA = "penstock.data"
PARENT = "penstock.parent"
ACCURACY = "penstock.heldout_accuracy"
REWARD = "penstock.heldout_reward"
VERDICT = "penstock.verdict"

_REFERENCE = re.compile(r"models:/(?P<name>[^/@:]+)(?:@(?P<alias>[^/@:]+)|/(?P<number>\d+))")


@dataclass(frozen=True)
class Reference:
    """A version as people name it: of a model, that of an alias or of a number."""

    name: str
    which: str | int

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"/{self.which}" if isinstance(self.which, int) else f"@{self.which}")


@dataclass(frozen=True)
class NewVersion:
    """A version to add.

    Attributes:
        name: of the model.
        tracked: what the tracker calls the run that it comes from.
        tags: what it says of itself, by the names above.
    """

    name: str
    tracked: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Version:
    """A version of a model."""

    name: str
    number: int
    tags: Mapping[str, str]

    def __str__(self) -> str:
        return str(Reference(self.name, self.number))

    @property
    def folder(self) -> Path | None:
        """Where its weights lie; None: it was registered by something else."""
        return Path(self.tags[FOLDER]) if FOLDER in self.tags else None

    @property
    def run(self) -> Path | None:
        """The run folder that it comes from; None: it was registered by something else."""
        return Path(self.tags[RUN]) if RUN in self.tags else None


class Registry(Protocol):
    """The models of a store; a name is in it once a version was added.

    A method raises `UserError` for what the user has to do, and anything else where the store does not answer.
    """

    @property
    def where(self) -> str:
        """Return the tracker's name and the store's address, without a password, for people."""

    def names(self) -> list[str]:
        """Return the names of all models."""

    def versions(self, name: str) -> list[Version]:
        """Return the versions of a model, the newest first; none of a name that is not there."""

    def aliases(self, name: str) -> dict[str, int]:
        """Return the number of the version of each alias of a model that is there."""

    def add(self, new: NewVersion) -> Version:
        """Add a version, the first with its name's model."""

    def point(self, alias: str, version: Version) -> None:
        """Give a version an alias, which another one may have."""

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Add tags to a version."""

    def dataset(self, name: str) -> Path | None:
        """Return the file of the dataset of a name that the newest run with one was given; None: there is none."""


def reference(text: str) -> Reference | None:
    """Return which version a text names; None: it is none of a registry.

    >>> str(reference("models:/sums@best")), reference("models:/sums/3").which, reference("models/sums")
    ('models:/sums@best', 3, None)

    Raises:
        UserError: it begins like one, and is none.
    """
    if not text.startswith(SCHEME):
        return None
    if (found := _REFERENCE.fullmatch(text)) is None:
        raise UserError(
            f"'{text}' names no version of a model", f"write {SCHEME}NAME@best, {SCHEME}NAME@latest or {SCHEME}NAME/3"
        )
    name, alias, number = found.groups()
    return Reference(name, alias if alias is not None else int(number))


def find(registry: Registry, wanted: Reference) -> Version:
    """Return a version.

    Raises:
        UserError: there is no such model, alias or version; names what there is.
    """
    versions = registry.versions(wanted.name)
    if not versions:
        raise _no_model(registry, wanted)
    aliases = registry.aliases(wanted.name) | {LATEST: versions[0].number}
    number = aliases.get(wanted.which) if isinstance(wanted.which, str) else wanted.which
    if (found := next((version for version in versions if version.number == number), None)) is not None:
        return found
    named = ", ".join(f"@{alias} (version {number})" for alias, number in sorted(aliases.items()))
    near = nearest_name(str(wanted.which), aliases)
    meant = f" (did you mean '@{near}'?)" if near else ""
    raise UserError(
        f"{wanted}: {registry.where} has no such version of '{wanted.name}'{meant}",
        f"there are versions {versions[-1].number} to {versions[0].number}, and {named}",
    )


def _no_model(registry: Registry, wanted: Reference) -> UserError:
    names = registry.names()
    near = nearest_name(wanted.name, names)
    meant = f" (did you mean '{near}'?)" if near else ""
    there = f"there are: {', '.join(sorted(names))}" if names else "there is none yet: record.registered_model adds one"
    return UserError(f"{wanted}: {registry.where} has no model '{wanted.name}'{meant}", there)


def best_of(registry: Registry, name: str) -> Version | None:
    """Return the version of a model that is best so far; None: there is none."""
    versions = registry.versions(name)
    number = registry.aliases(name).get(BEST) if versions else None
    return next((version for version in versions if version.number == number), None)


def register(registry: Registry, new: NewVersion) -> Version:
    """Return the version of these weights of this run, which is added unless it is there; the first is `best`."""
    same = (FOLDER, RUN, WEIGHTS)
    found = [
        version
        for version in registry.versions(new.name)
        if all(version.tags.get(name) == new.tags[name] for name in same)
    ]
    version = found[0] if found else registry.add(new)
    if BEST not in registry.aliases(new.name):
        registry.point(BEST, version)
    return version


def check_weights(version: Version) -> Path:
    """Return the folder of a version once its weights are seen to be those that were registered.

    Raises:
        UserError: the folder is gone, or holds other weights; or the version names none.
    """
    if (folder := version.folder) is None:
        raise UserError(f"{version} says of no folder that holds its weights", "Penstock did not register it")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{version}: its folder {folder} is not there",
            "put it back, or name another version; a registry refers to folders and keeps no weights",
        )
    if weights_digest(folder) != version.tags.get(WEIGHTS):
        raise UserError(
            f"{version}: {folder} holds other weights than those that were registered",
            "name a newer version; a run that went on since then has registered its new model",
        )
    return folder


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a model folder's weights: what `sha256sum *.safetensors | sha256sum` says of them."""
    paths = sorted(folder.glob("*.safetensors"))
    digests = for_each_file(paths, sha256)
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
