"""Portions: the groups of a rollout as they are complete, while others are still generated (`rollout.stream`).

A portion has whole groups, in the order in which the last responses to their prompts end. Which ones make a portion
decides in which order numbers are added, so timing has no part in it where it has none in the tokens
(`rollout.reproducible`): every engine then has prompts of its own, and of each portion its share. Otherwise whatever is
complete first is in the first portion.

Groups with the longest responses come last, one after the other, and what is learnt from them nothing hides any more.
So the last portions are small, each half of the one before, and the last one is a single group.

Left out: what is made of a portion (penstock/tasks/stream).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import (
    CarriedEpisodes,
    CarriedResponses,
    EngineResponses,
    Episodes,
    PartialResults,
)
from penstock.session.requests import BegunRollout, Replies
from penstock.session.rollout.episodes import episode_columns
from penstock.session.rollout.generation import Responses, all_counted, asked_in_order

LOOK_S = 0.5  # how long a generation may have failed before who waits for a portion is told


class Portions:
    """What engines have told of a rollout's responses.

    Args:
        prompts: of the rollout.
        samples: responses to each.
        count: portions.
        engines: whose prompts are fixed from the start; 1 where engines take them as they can.
        policy_version: with which they generate.
        wanted: how many of the prompts make the batch, of which engines tell; None: all.
    """

    def __init__(
        self, prompts: int, samples: int, count: int, engines: int, policy_version: int, wanted: int | None = None
    ) -> None:
        self.count, self._samples, self._engines, self._policy_version = count, samples, engines, policy_version
        self._left = np.full(prompts, samples)
        self._complete: list[list[int]] = [[] for _ in range(engines)]  # positions, in the order of their ends
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # by position, sample: of the news, and in it
        self._news: list[PartialResults] = []
        self._changed = threading.Condition()
        self._order = _in_turns([len(range(engine, wanted or prompts, engines)) for engine in range(engines)])
        self._ends = _ends(len(self._order), count)

    def hear(self, news: PartialResults | EngineResponses | None) -> None:
        """Keep what an engine tells; its reply repeats it."""
        if not isinstance(news, PartialResults):
            return
        sequence = self._complete[news.engine if self._engines > 1 else 0]
        with self._changed:
            self._news.append(news)
            entries = zip(news.ended.positions.tolist(), news.ended.samples.tolist(), strict=True)
            for row, (position, sample) in enumerate(entries):
                self._places[position, sample] = len(self._news) - 1, row
                self._left[position] -= 1
                if not self._left[position] and news.counted is None:
                    sequence.append(position)
            sequence += news.counted or ()
            self._changed.notify_all()

    def wait(self, number: int, replies: Future[Replies]) -> list[int]:
        """Wait until a portion is complete; return its positions, ascending.

        Raises:
            RuntimeError: engines have replied and not told of all responses.
            Exception: what ended the generation.
        """
        with self._changed:
            while True:
                done = replies.done()
                if (positions := self._positions(number)) is not None:
                    return positions
                if done:
                    replies.result()
                    raise RuntimeError(f"the engines are done, and portion {number + 1} of {self.count} is not whole")
                self._changed.wait(LOOK_S)

    def responses(self, positions: Sequence[int]) -> Responses:
        """Return the responses to prompts that are complete, ascending positions, as a rollout's."""
        with self._changed:
            news = list(self._news)
            places = [self._places[position, sample] for position in positions for sample in range(self._samples)]
        firsts = np.cumsum([0, *(len(one.texts) for one in news)])
        rows_B = np.asarray([firsts[number] + row for number, row in places], np.int64)
        parts: list[CarriedResponses] = [one.ended.responses for one in news]
        every = Ragged.concatenated([part.tokens for part in parts])
        logprobs_T = np.concatenate([part.logprobs_T for part in parts])
        versions_T = np.concatenate([part.versions_T for part in parts])
        tokens, played = every.take(rows_B), [part.episodes for part in parts if part.episodes is not None]
        asked = [episodes.asked for episodes in played if episodes.asked is not None]
        mask_T = np.concatenate([episodes.loss_mask_T for episodes in played]) if played else None
        return Responses(
            answered_P=np.asarray(positions, np.int64),
            tokens=tokens,
            texts=pa.concat_arrays([one.texts for one in news]).take(pa.array(rows_B)),
            truncated_B=np.concatenate([part.truncated_B for part in parts])[rows_B],
            policy_version=self._policy_version,
            metrics={},
            loss_mask=all_counted(tokens) if mask_T is None else Ragged(mask_T, every.offsets_B1).take(rows_B),
            episodes=episode_columns([_played(episodes) for episodes in played], rows_B),
            logprobs=Ragged(logprobs_T, every.offsets_B1).take(rows_B) if len(logprobs_T) else None,
            policy_versions=Ragged(versions_T, every.offsets_B1).take(rows_B),
            asked=asked_in_order(asked, rows_B),
        )

    def _positions(self, number: int) -> list[int] | None:
        """Return the prompts of a portion; None: they are not complete."""
        first = self._ends[number - 1] if number else 0
        found = [(self._complete[engine], place) for engine, place in self._order[first : self._ends[number]]]
        if any(place >= len(sequence) for sequence, place in found):
            return None
        return sorted(sequence[place] for sequence, place in found)


def _played(episodes: CarriedEpisodes) -> Episodes:
    """Return what episodes that have ended add to responses; an agent's turns count wherever they were drawn."""
    aside_B = 0 if episodes.asked is None else episodes.asked.unbridged_B
    return Episodes(
        loss_mask_T=episodes.loss_mask_T,
        turns_B=episodes.turn_ends.lengths_B + aside_B,
        rewards_B=episodes.rewards_B,
        parts_B=episodes.parts_B,
        failures_B=episodes.failures_B,
        waited_seconds=0.0,
        asked=episodes.asked,
    )


@dataclass(frozen=True)
class StreamedRollout(BegunRollout):
    """A rollout whose responses are learnt from as they are complete."""

    portions: Portions


def _ends(groups: int, count: int) -> list[int]:
    """Return how many groups have come with each portion: evenly, but for small ones in the last quarter of them."""
    small, size = [1], 1  # the last one first
    while size < groups // count and len(small) < count // 4:
        small.append(size)
        size *= 2
    if len(small) == 1:
        small = []
    even, others = groups - sum(small), count - len(small)
    ends = [(number + 1) * even // others for number in range(others)]
    return [*ends, *(even + end for end in accumulate(reversed(small)))]


def _in_turns(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the places of several sequences as one, each spread evenly over it: sequence, place in it."""
    places = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    return sorted(places, key=lambda at: ((at[1] + 0.5) / lengths[at[0]], at[0]))
