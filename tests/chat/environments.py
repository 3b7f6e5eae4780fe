"""Classes in the shape of TRL's `environment_factory`: `reset`, public methods as tools, `get_reward`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from penstock.environments.environment import Step


class Sums:
    """A problem `a` + `b`, which the tool solves; worth 1 if a tool was asked and gave the answer."""

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def reset(self, **row: Any) -> str | None:
        self.row, self.asked = row, list[str]()
        return self.note

    def add(self, a: int, b: int) -> str:
        """
        Add two numbers.

        Args:
            a: the first
            b: the second
        """
        self.asked.append(f"{a}+{b}")
        return str(a + b)

    def look_up(self, name: str) -> dict[str, int]:
        """
        Look up a number.

        Args:
            name: what it is called
        """
        return {name: {"one": 1}[name]}

    def get_reward(self) -> float:
        return float(f"{self.row['a']}+{self.row['b']}" in self.asked)

    def _no_tool(self) -> None:
        raise AssertionError


class Named:
    """Its `reset` names what it wants of the row; there is no reward, and a tool that ends the process."""

    def reset(self, a: int, seed: int) -> None:
        self.begun = (a, seed)

    def leave(self) -> None:
        """Leave."""
        os._exit(3)

    def stop(self) -> None:
        """Stop."""
        sys.exit("stopped")


class Slow(Sums):
    """A tool that waits."""

    async def add(self, a: int, b: int) -> str:  # type: ignore[override]
        """
        Add two numbers.

        Args:
            a: the first
            b: the second
        """
        await asyncio.sleep(0.01)
        return super().add(a, b)


class Undescribed:
    """A tool whose argument nobody describes."""

    def reset(self, **row: Any) -> None: ...

    def add(self, a: int) -> int:
        """Add."""
        return a


class BareReset:
    """Ours by its `step`, with a `reset` that takes neither row nor seed."""

    def reset(self) -> None: ...

    def step(self, text: str) -> Step: ...  # type: ignore[empty-body]


class Ours:
    """Of our own interface, with a public method beside it."""

    stop = ("!",)

    def reset(self, row: dict[str, Any], seed: int) -> None: ...

    def step(self, text: str) -> Any: ...

    def helper(self) -> None: ...
