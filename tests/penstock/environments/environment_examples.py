"""Environments that behave and environments that do not, by what the policy says."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from penstock.environments.environment import Step
from tests.processes import leave_children


class Misbehaves:
    """Counts its turns; certain words make it fail."""

    stop = ["!"]

    def __init__(self, factor: int = 1) -> None:
        self.factor, self.turns, self.key, self.seed = factor, 0, "", 0

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.key, self.seed = row["key"], seed
        if self.key == "no start":
            raise LookupError("no such episode")
        return self.key if self.key.startswith("greets") else None

    def step(self, text: str) -> Any:
        self.turns += 1
        if text == "raise":
            raise LookupError("no such tool")
        if text == "sleep":
            time.sleep(60)
        if text == "hang":
            sum(itertools.repeat(0))  # for ever in C, where no signal handler runs
        if text == "die":
            time.sleep(0.1)  # until Pebble knows whose call this is, and can say with which code it ended
            os._exit(7)
        if text == "leave":
            leave_children(self.key)
        if text == "exit":
            raise SystemExit(3)
        if text == "text":
            return "an observation"
        if text == "silent":
            return Step()
        if text == "nan":
            return Step(done=True, reward=float("nan"))
        if text == "bytes":
            return Step(b"observation")  # type: ignore[arg-type]
        if text == "parts":
            return Step(done=True, reward={"right": 1.0, "polite": 0.5})
        return Step(f"{self.key} {self.turns} {text} {self.factor * self.seed}", reward=0.5)


class WithoutStep:
    """No environment."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Nothing."""


class WrongStop(Misbehaves):
    """Ends turns at a number."""

    stop = (3,)  # type: ignore[assignment]
