"""Which prompts a rollout engine answers: a fixed share, or whatever it pulls before another engine does.

Several engines pull from one counter in the process group's store, longest prompts first, so that none idles while
prompts wait elsewhere. No message goes through the flow, and no rank waits for another engine's.

Suffix: `_P` prompts.
Left out: when an engine has room for more (penstock/engines/rollout/responses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

PULLS_PER_SHARE = 2  # a pull takes half of an engine's fair share of what is left
Counter = Callable[[int], int]  # takes that many from a shared count; returns what the count was before


@dataclass(frozen=True)
class EnginePlace:
    """Which of a group's rollout engines a rank belongs to; engines of several ranks are tensor parallel."""

    engine: int
    engines: int
    rank_in_engine: int
    ranks_per_engine: int


def place_of(rank: int, ranks: int, ranks_per_engine: int) -> EnginePlace:
    """Return the place of one of a group's ranks; neighbours form an engine."""
    engine, rank_in_engine = divmod(rank, ranks_per_engine)
    return EnginePlace(engine, ranks // ranks_per_engine, rank_in_engine, ranks_per_engine)


class PromptQueue(Protocol):
    """Where an engine gets its prompts from."""

    @property
    def exhausted(self) -> bool:
        """Whether no prompt is left."""

    def take(self, room: int) -> Sequence[int]:
        """Return positions of prompts to submit; `room` is how many the engine could start now."""


class FixedShare:
    """Prompts that are this engine's from the start.

    Args:
        at_once: it takes all of them in the beginning, and what has no room waits inside vLLM; else what there is room
            for.
    """

    def __init__(self, positions_P: np.ndarray, at_once: bool = True) -> None:
        self._positions: list[int] = positions_P.tolist()
        self._at_once = at_once

    @property
    def exhausted(self) -> bool:
        """Whether the prompts were taken."""
        return not self._positions

    def take(self, room: int) -> Sequence[int]:
        """Return the next positions."""
        count = len(self._positions) if self._at_once else room
        taken, self._positions = self._positions[:count], self._positions[count:]
        return taken


class PulledPrompts:
    """Prompts that go to whichever engine has room first.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a pull takes a fraction of what is left for each engine,
    so the first pulls are large, and the last prompts are handed out one by one. An engine pulls at most once a step,
    so those that have room at the same time take turns.

    Args:
        own: positions that are this engine's in any case, before all others.
    """

    def __init__(self, order_P: np.ndarray, engines: int, counter: Counter, own: Sequence[int] = ()) -> None:
        self._order, self._engines, self._counter = order_P, engines, counter
        self._own = FixedShare(np.asarray(own, np.int64), at_once=False)
        self._taken = 0  # by all engines, as far as this one knows

    @property
    def exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self._own.exhausted and self._taken >= len(self._order)

    def take(self, room: int) -> Sequence[int]:
        """Return the next positions, at most `room`; none if other engines were faster."""
        if not self._own.exhausted:
            return self._own.take(room)
        left = len(self._order) - self._taken
        wanted = max(1, min(room, left // (PULLS_PER_SHARE * self._engines)))
        first = self._counter(wanted)
        self._taken = first + wanted
        positions: list[int] = self._order[first : first + wanted].tolist()
        return positions


def pull_order(lengths_P: np.ndarray, carried: int = 0) -> np.ndarray:
    """Return positions of prompts, longest first: the one thing known of what a prompt will cost.

    Args:
        carried: prompts at the first positions with whose responses a generation goes on: before all others, as they
            are.
    """
    return np.concatenate([np.arange(carried), carried + np.argsort(-lengths_P[carried:], kind="stable")])


def prompt_queue(
    lengths_P: np.ndarray,
    place: EnginePlace,
    store: Any,
    generation: int,
    fixed: bool,
    carried: int = 0,
    at_once: bool = True,
    homes_P: np.ndarray | None = None,
) -> PromptQueue:
    """Return where an engine gets its prompts from; with `fixed`, timing has no part in it.

    Args:
        carried: as in `pull_order`.
        at_once: as in `FixedShare`.
        homes_P: int32, of the first prompts the engines that have what lives of them, and that they go to unless they
            are `fixed`, as a part of a quota is then; another number: none has.
    """
    if place.engines == 1:
        return FixedShare(np.arange(len(lengths_P)), at_once)
    order_P = pull_order(lengths_P, carried)
    if fixed:
        return FixedShare(order_P[place.engine :: place.engines], at_once)
    homes_P = np.empty(0, np.int32) if homes_P is None else homes_P
    own = np.flatnonzero(homes_P == place.engine)
    anyones = ~np.isin(order_P, np.flatnonzero((homes_P >= 0) & (homes_P < place.engines)))
    return PulledPrompts(order_P[anyones], place.engines, store_counter(store, place, str(generation)), own.tolist())


def store_counter(store: Any, place: EnginePlace, counted: str) -> Counter:
    """Return a count shared by the engines of a process group, kept in its TCPStore.

    The ranks of one engine must submit the same requests: the first one counts and leaves what it got in the store
    for the others, which wait for it. So they have to ask equally often.

    Args:
        counted: name that no other count in this store has.
    """
    name, asked = f"rollout/{counted}", 0

    def take(number: int) -> int:
        nonlocal asked
        told, asked = f"{name}/{place.engine}/{asked}", asked + 1
        if place.rank_in_engine:
            return int(store.get(told))
        before = int(store.add(name, number)) - number
        if place.ranks_per_engine > 1:
            store.set(told, str(before))
        return before

    return take
