"""A game of two that talk at random, in the way that the data row's `kind` says."""

from __future__ import annotations

from typing import Any

from penstock.environments.environment import Step


class Talking:
    """The host says twice what the guest hears as its length, and the other way round; the guest is paid most."""

    agents = ("host", "guest")
    stop = ("=", "7", "e")

    def reset(self, row: dict[str, Any], seed: int) -> Step:
        self.kind, self.heard = row["kind"], 0
        return Step(agent="host", observation=f"host {seed % 10} ")

    def step(self, text: str) -> Step:
        self.heard += 1
        paid = {"host": 0.25, "guest": {"turns": 1.0, "length": len(text) / 100}}
        if self.kind == "broken" and self.heard == 2:
            raise LookupError("the guest has left")
        if self.kind == "alone" or (self.heard == 4 and self.kind != "endless"):
            return Step(done=True, rewards=paid)
        if self.kind == "crowded" and self.heard == 2:
            return Step(agent="host", observation="9" * 100, rewards=paid)
        if self.kind == "long" and self.heard == 1:
            return Step(agent="guest", observation="9" * 100)
        agent = self.agents[self.heard % 2]
        shown = f"({len(text)})" if self.heard > 1 else f"guest of {len(text)} "
        return Step(agent=agent, observation=shown, rewards=paid)
