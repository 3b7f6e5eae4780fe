"""Evaluators as a user would write them, good and bad ones; processes import this module from the working directory."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from penstock.evaluators.bootstrap import with_intervals
from penstock.evaluators.heldout import HeldOut
from tests.processes import leave_children


class RightAnswers:
    """Uses everything: columns of the data, texts, and the project's own intervals."""

    name = "right"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        right = [float(row["answer"] in text) for row, text in zip(heldout.rows, heldout.texts, strict=True)]
        return with_intervals({"share": heldout.per_prompt(heldout.rewards_B * 0 + right).mean(axis=1)})


class Raises(RightAnswers):
    name = "raises"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        raise LookupError("no such thing")


class Leaves(RightAnswers):
    name = "leaves"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        leave_children(heldout.texts[0])
        return {}


class Exits(RightAnswers):
    name = "exits"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        os._exit(3)


class Sleeps(RightAnswers):
    name = "sleeps"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        time.sleep(600)
        return {}


class NotesItsProcess(RightAnswers):
    """Leave this process's id in the folder that the first response names, then hang in C."""

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        Path(heldout.texts[0], str(os.getpid())).touch()
        sum(itertools.repeat(0))
        return {}


class ReturnsAList(RightAnswers):
    name = "list"

    def evaluate(self, heldout: HeldOut) -> Any:
        return [1.0]


class ReturnsOddNames(RightAnswers):
    name = "odd"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        return {"mean@4": 1.0}


class WithoutName:
    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        return {}


class WithoutMethod:
    name = "nothing"


class AsksForMore(RightAnswers):
    def __init__(self, path: str) -> None:
        self.path = path


class SameName(RightAnswers):
    pass


NUMBER = 3
