"""Commands that write models to folders and read them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engines.commands.message import Command


@dataclass(frozen=True)
class Save(Command[None]):
    """Write every trained model of the group, and the ranks' random generators, under `folder`."""

    measured: ClassVar[bool] = False
    folder: str


@dataclass(frozen=True)
class Load(Command[None]):
    """Restore what `Save` wrote; a rollout engine of the group gets the actor's weights as policy `version`."""

    measured: ClassVar[bool] = False
    folder: str
    version: int


@dataclass(frozen=True)
class Export(Command[None]):
    """Write the actor as a Hugging Face folder."""

    measured: ClassVar[bool] = False
    folder: str
