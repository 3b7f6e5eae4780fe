"""Commands that write models to folders or to their host's memory, and read them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Save(Command[None]):
    """Write every trained model of the group, and the ranks' random generators, under `folder`."""

    measured: ClassVar[bool] = False
    folder: str


@dataclass(frozen=True)
class Load(Command[None]):
    """Restore what `Save` wrote; a rollout engine of the group gets the actor's weights as policy `version`."""

    measured: ClassVar[bool] = False
    changes_state: ClassVar[bool] = True
    folder: str
    version: int


@dataclass(frozen=True)
class TakeSnapshot(Command[None]):
    """Begin to copy the trained state, and the generators, to the slot at `path`; the reply comes at once.

    Whatever would change the state waits until the copy is whole. `of` and `number` name it: the state after this
    iteration or step.
    """

    measured: ClassVar[bool] = False
    changes_state: ClassVar[bool] = True  # of the copy before this one
    of: str
    number: int
    path: str


@dataclass(frozen=True)
class LoadSnapshot(Command[None]):
    """Restore what ranks have copied to the slots at `paths`; `version` as for `Load`."""

    measured: ClassVar[bool] = False
    changes_state: ClassVar[bool] = True
    paths: list[str]
    version: int


@dataclass(frozen=True)
class Export(Command[None]):
    """Write the actor as a Hugging Face folder."""

    measured: ClassVar[bool] = False
    folder: str
