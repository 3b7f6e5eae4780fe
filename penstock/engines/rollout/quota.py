"""How many prompts of a generation have to be answered: all of them, or a quota, after which it ends.

A quota leaves the longest responses for later, so that nobody waits for them. Some prompts may be required: those that
have waited for long. The others fill what is left of the quota. What a quota leaves does not count, nor does an answer
that comes in the very step in which other engines have filled it: the flow asks those prompts again.

Left out: which prompts are begun (penstock/engines/rollout/prompt_queue.py), which are asked again
(penstock/session/rollout/rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.engines.rollout.prompt_queue import Counter, EnginePlace, store_counter

LOOK_EVERY = 8  # steps: a look into the group's store takes about 0.1 ms


class Quota(Protocol):
    """What an engine counts its answered prompts against."""

    @property
    def reached(self) -> bool:
        """Whether enough prompts are answered, as far as this engine knows."""

    def count(self, answered: Sequence[int]) -> list[int]:
        """Return which of the prompts that the last step has answered count; asked after each step.

        Args:
            answered: their positions in the generation.
        """


class AllPrompts:
    """No quota: every prompt counts, and the generation ends with the last."""

    reached = False

    def count(self, answered: Sequence[int]) -> list[int]:
        """All count."""
        return list(answered)


class OwnQuota:
    """A quota of this engine's own: timing has no part in it.

    Args:
        wanted: prompts of this engine.
        required: those of them whose positions are required.
        below: positions below this one are required.
    """

    def __init__(self, wanted: int, required: int = 0, below: int = 0) -> None:
        self._required, self._others, self._below = required, wanted - required, below

    @property
    def reached(self) -> bool:
        """Whether this engine has answered its part."""
        return not (self._required or self._others)

    def count(self, answered: Sequence[int]) -> list[int]:
        """Those count that are required, and others for which there is room."""
        required, others = _parted(answered, self._below)
        others = others[: self._others]
        self._required -= len(required)
        self._others -= len(others)
        return [*required, *others]


class SharedQuota:
    """A quota that all engines of a group fill together, whichever is faster.

    Args:
        required: the prompts at the positions below this number.
        counter: what they have answered together of the others.
        required_counter: what they have answered together of the required ones.
    """

    def __init__(self, wanted: int, counter: Counter, required: int, required_counter: Counter) -> None:
        self._others, self._counter = wanted - required, counter
        self._required, self._required_counter = required, required_counter
        self._steps = 0
        self.reached = False

    def count(self, answered: Sequence[int]) -> list[int]:
        """Those count that are required, and others that come before there is no room for them."""
        self._steps += 1
        if not answered and self._steps % LOOK_EVERY:
            return []
        required, others = _parted(answered, self._required)
        before = self._counter(len(others))
        missing = self._required - self._required_counter(len(required)) - len(required) if self._required else 0
        self.reached = before + len(others) >= self._others and missing <= 0
        return [*required, *others[: max(0, self._others - before)]]


def _parted(positions: Sequence[int], required: int) -> tuple[list[int], list[int]]:
    return [at for at in positions if at < required], [at for at in positions if at >= required]


def quota_of(
    wanted: int | None, place: EnginePlace, store: Any, generation: int, fixed: bool, required: int = 0
) -> Quota:
    """Return an engine's quota.

    Args:
        wanted: prompts that all engines have to answer together; None: all that they begin.
        generation: number that no other generation in this store has.
        fixed: timing has no part in which prompts are answered.
        required: of the wanted ones, those at the first positions, which engines begin in turn.
    """
    if wanted is None:
        return AllPrompts()
    if fixed or place.engines == 1:
        own, own_required = (len(range(place.engine, count, place.engines)) for count in (wanted, required))
        return OwnQuota(own, own_required, required)
    counters = [store_counter(store, place, f"{generation}/{counted}") for counted in ("answered", "required")]
    return SharedQuota(wanted, counters[0], required, counters[1])
