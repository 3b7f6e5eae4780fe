"""Games that do what they are told: the row's `moves` are what reset and step return."""

from __future__ import annotations

from typing import Any

from penstock.environments.environment import Step


class Scripted:
    agents = ("a", "b")

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.moves = list(row["moves"])
        return self.moves.pop(0)

    def step(self, text: str) -> Any:
        return self.moves.pop(0)


class ScriptedAsync(Scripted):
    async def step(self, text: str) -> Any:
        return self.moves.pop(0)


class Others(Scripted):
    agents = ("b", "a")


class Nameless(Scripted):
    agents = 2  # type: ignore[assignment]


class Lonely(Scripted):
    agents = ("a",)  # type: ignore[assignment]


class Alone:
    def reset(self, row: dict[str, Any], seed: int) -> None: ...

    def step(self, text: str) -> Step:
        return Step(done=True, rewards={"a": 1.0})


class OverHttp:
    agents = ("a", "b")

    async def run(self, row: dict[str, Any], seed: int, policy: Any) -> float:
        return 0.0


class WithTools:
    agents = ("a", "b")

    def reset(self, **row: Any) -> None: ...

    def add(self, one: int, other: int) -> int:
        """
        Add.

        Args:
            one: a number
            other: another
        """
        return one + other
