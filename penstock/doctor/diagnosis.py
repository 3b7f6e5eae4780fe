"""One line of `penstock doctor`: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Diagnosis:
    """A warning is about speed or a danger; with a problem trainings do not run. Both have a remedy."""

    subject: str
    level: Level
    text: str
    remedy: str = ""
