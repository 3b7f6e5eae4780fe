"""An environment for a model that talks at random: it answers by the data row's `kind`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any, ClassVar

from penstock.environments.agent import Policy
from penstock.environments.calculator import _completed
from penstock.environments.environment import Step


class Playground:
    """Says how long a turn was, and a digit of its seed, until it has heard `turns` of them."""

    stop = ("=", "7", "e")

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.kind, self.digit, self.heard = turns, "", 0, 0

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.kind, self.digit = row["kind"], seed % 10
        if self.kind == "flooded":
            return "9" * 100
        return "go " if self.kind == "greeted" else None

    def step(self, text: str) -> Step:
        self.heard += 1
        if self.kind == "broken":
            raise LookupError("no such tool")
        if self.kind == "long":
            return Step("9" * 100, reward=0.5)
        if self.kind != "endless" and self.heard == self.turns:
            return Step(done=True, reward={"right": 1.0, "reward": 2.0})
        return Step(f"({len(text)}/{self.digit})", reward=0.25)


class Gathering(Playground):
    """The same in coroutines: the first `together` episodes of a worker begin only once all of them are about to."""

    begun: ClassVar[list[int]] = []
    all_there = asyncio.Event()

    def __init__(self, turns: int = 3, together: int = 1) -> None:
        super().__init__(turns)
        self.together = together

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:  # type: ignore[override]
        self.begun.append(seed)
        if len(self.begun) == self.together:
            self.all_there.set()
        await self.all_there.wait()
        return super().reset(row, seed)

    async def step(self, text: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(text)


class Moody(Playground):
    """Says something else in each process that it is played in."""

    def step(self, text: str) -> Step:
        """Answer as ever, and name the process."""
        answer = super().step(text)
        return replace(answer, observation=f"{os.getpid()}" if answer.observation else None)


class PlaygroundAgent:
    """Plays `Playground` by asking: a text that begins with `prompt` and goes on with each turn and answer."""

    stop = Playground.stop

    def __init__(self, turns: int = 3, prompt: str = "go ") -> None:
        self.played, self.prompt = Playground(turns), prompt

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        text, reward = self.prompt, 0.0
        self.played.reset(row, seed)
        while (turn := await _completed(policy, text)) is not None:
            step = self.played.step(turn)
            reward += step.reward["reward"] if isinstance(step.reward, dict) else float(step.reward or 0.0)  # type: ignore[arg-type]
            text += turn + (step.observation or "")
            if step.done:
                break
        return reward


class MoodyAgent(PlaygroundAgent):
    """Asks for something else in each process that it is played in."""

    def __init__(self) -> None:
        super().__init__()
        self.played = Moody()
