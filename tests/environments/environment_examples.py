"""Environments that behave and environments that do not, by what the policy says."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
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
        if text == "half a pair":
            return Step("\ud83d", reward={"smil\ud83d": 1.0})
        if text == "raise half a pair":
            raise LookupError("no file caf\udce9")
        if text == "parts":
            return Step(done=True, reward={"right": 1.0, "polite": 0.5})
        return Step(f"{self.key} {self.turns} {text} {self.factor * self.seed}", reward=0.5)


class MisbehavesAsync(Misbehaves):
    """The same, in coroutines; others of its worker go on while one sleeps."""

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(row, seed)

    async def step(self, text: str) -> Any:
        await asyncio.sleep(60 if text == "sleep" else 0)
        return super().step(text)


DOOR = asyncio.Event()
MEETINGS: dict[int, asyncio.Barrier] = {}
CANCELLED: list[str] = []


class Talks:
    """Answers two turns with the number of each and ends with the third, whatever is said; a digit ends a turn."""

    stop = [*"0123456789"]

    def __init__(self) -> None:
        self.turns, self.seed = 0, 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.turns, self.seed = 0, seed

    def step(self, text: str) -> Step:
        self.turns += 1
        return Step(done=True, reward=0.0) if self.turns == 3 else Step(f"<{self.seed % 97}+{self.turns}>")


class Waits:
    """Its calls wait for other calls of the same worker; says how many turns it has had, and what it found."""

    def __init__(self) -> None:
        self.key, self.turns = "", 0

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.key = row["key"]
        return await self.found(*self.key.split())

    async def step(self, text: str) -> Step:
        self.turns += 1
        return Step(f"{self.turns}: {await self.found(*text.split())}")

    async def found(self, word: str, *arguments: str) -> str:
        match word:
            case "meet":  # as many calls as are to be under way at a time
                count = int(arguments[0])
                await MEETINGS.setdefault(count, asyncio.Barrier(count)).wait()
            case "open":
                DOOR.set()
            case "pass":
                await DOOR.wait()
            case "stay":  # for ever
                try:
                    await asyncio.Event().wait()
                finally:
                    CANCELLED.append(self.key)
            case "cling":  # also to a cancelled call
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        CANCELLED.append(self.key)
            case "cancelled":
                return " ".join(CANCELLED)
            case "block":
                time.sleep(60)
            case "die":
                await asyncio.sleep(0.3)
                os._exit(7)
            case "run":  # a process for as long as several hand-backs
                program = (sys.executable, "-c", "import time; time.sleep(0.5)")
                return str(await (await asyncio.create_subprocess_exec(*program)).wait())
            case "leave":
                return str((await asyncio.create_subprocess_exec("sleep", "60")).pid)
            case "alive":
                return str(os.path.exists(f"/proc/{arguments[0]}"))  # noqa: PTH110
        return "fine"


class HalfAsync(Waits):
    """Its `reset` is a plain method."""

    def reset(self, row: dict[str, Any], seed: int) -> str | None:  # type: ignore[override]
        return None


MEETING = threading.Barrier(2)


class MeetsInTurn:
    """Waits for another call, in a plain method."""

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        MEETING.wait()
        return None

    def step(self, text: str) -> Step:
        return Step("on")


class WithoutStep:
    """No environment."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Nothing."""


class WrongStop(Misbehaves):
    """Ends turns at a number."""

    stop = (3,)  # type: ignore[assignment]
