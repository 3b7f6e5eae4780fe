"""Which rows go together: rows to ranks and micro-batches, so that every rank has equal work and prompts stay shared.

The samples of a prompt stand next to each other, and the forward pass computes a prompt once for all its samples in a
micro-batch (penstock/engines/batches/packing.py). So the rows are laid out as one line, prompt by prompt. The line is
cut into equal shares, one a rank, each cut at the row nearest to its ideal place; every share is filled into as few
micro-batches as its tokens need, and these are then made as even as that number and the rows allow. A cut computes at
most one prompt twice.

Where rows share more than prompts (penstock/engines/batches/trees.py) there is a second line, in which prompts stand
beside those, and a prompt's rows beside those of its own, with which they share most. It is taken where fewer tokens
are computed, in no more micro-batches. What sharing spares is not counted in filling them, so that a micro-batch needs
no more memory than one of rows that share prompts alone.

A row of several conversations (penstock/engines/batches/paths.py) is never cut apart, and laid out by its first prompt.

The plan is a pure function of the rows, so every rank computes the same plan by itself and nothing is sent. All ranks
run the same number of micro-batches, because gradients are reduced in step. Planning takes time in proportion to the
rows, for any lengths.

Suffixes: `_B` rows, `_B1` offsets (B+1), `_U` units (rows that are never cut apart), `_U1` offsets of units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.base.ragged import offsets_of
from penstock.engines.batches.packing import Arranged, Rows, arrange, first_seen, prompt_by_prompt


def plan_micro_batches(
    rows: Rows, ranks: int, budget: int, index_B: np.ndarray | None = None, together: int = 1
) -> list[list[list[int]]]:
    """Return plan[rank][micro_batch] -> row numbers, each micro-batch within `budget` tokens where rows allow it.

    Every rank gets the same number of micro-batches. A row longer than the budget gets one of its own. The last
    lists of a rank may be empty, where it has fewer rows than places; `pack` then makes a run that counts nothing.

    Args:
        index_B: the rows to plan; None for all.
        together: so many rows that follow each other, all of one prompt, are never cut apart.
    """
    index_B = np.arange(len(rows)) if index_B is None else index_B
    if together > 1 or rows.paths is not None:
        index_B = index_B[prompt_by_prompt(rows, index_B)[0]]
        return _lists(index_B, _cuts(rows, index_B, ranks, budget, together))
    arranged = arrange(rows, index_B)
    index_B = index_B[arranged.order_B]
    cuts = _cuts(rows, index_B, ranks, budget)
    if not arranged.origins.beyond_prompts:
        return _lists(index_B, cuts)
    line_B = _beside(arranged)
    others = _cuts(rows, index_B[line_B], ranks, budget)
    return _lists(index_B[line_B], others) if _gains(arranged, line_B, others, cuts) else _lists(index_B, cuts)


def _cuts(rows: Rows, index_B: np.ndarray, ranks: int, budget: int, together: int = 1) -> list[list[int]]:
    """Cut a line of rows into the micro-batches of each rank: a rank's first row, where each one ends, ..."""
    ids_B, prompts_B = rows.prompt_ids_B[index_B], rows.prompts.lengths_of(index_B)
    opens_B = np.append(True, ids_B[1:] != ids_B[:-1])[: len(index_B)]
    line_B1 = offsets_of(rows.behind_prompts_of(index_B) + np.where(opens_B, prompts_B, 0))
    opens_U = (line_B1[:-1] - np.where(opens_B, 0, prompts_B))[::together]
    line = _Line(line_B1[::together].tolist(), opens_U.tolist())
    shares = _shares(line_B1[::together], ranks)
    count = max(1, *(len(line.fill(start, stop, budget)) - 1 for start, stop in shares))
    return [[together * unit for unit in line.spread(start, stop, count, budget)] for start, stop in shares]


@dataclass(frozen=True)
class _Line:
    """Units one after another, to be cut into pieces; plain lists, because they are looked at one by one.

    Attributes:
        at_U1: the token at which each unit begins; of a prompt's units the first one has the prompt.
        opens_U: the token at which a piece that begins with this unit begins: at its prompt, which the piece computes.
            Never less than that of the unit before.
    """

    at_U1: list[int]
    opens_U: list[int]

    def fill(self, start: int, stop: int, capacity: int) -> list[int]:
        """Cut units into pieces of at most `capacity` tokens, each as long as can be; a larger unit stands alone."""
        cuts = [start]
        while cuts[-1] < stop:
            cuts.append(self._full(cuts[-1], stop, capacity))
        return cuts

    def spread(self, start: int, stop: int, count: int, budget: int) -> list[int]:
        """Cut units into `count` pieces, the heaviest as light as can be; into one each if there are fewer units.

        Args:
            count: as many as suffice where a piece may have `budget` tokens.
        """
        capacity = self._least_capacity(start, stop, count, budget)
        soonest, cuts = self._starts_from_the_end(start, stop, capacity), [start]
        for left in range(min(count, stop - start), 0, -1):
            rest = soonest[left - 1] if left <= len(soonest) else start
            cuts.append(max(rest, self._end(cuts[-1], stop, left, capacity)))
        return cuts

    def _least_capacity(self, start: int, stop: int, count: int, budget: int) -> int:
        """The fewest tokens of a piece with which `count` suffice: tried from the mean to the budget, by halves."""
        mean = -(-(self.at_U1[stop] - self.at_U1[start]) // count)
        least, enough = min(mean, budget), budget
        while least < enough:
            tried = (least + enough) // 2
            if len(self.fill(start, stop, tried)) - 1 <= count:
                enough = tried
            else:
                least = tried + 1
        return enough

    def _starts_from_the_end(self, start: int, stop: int, capacity: int) -> list[int]:
        """Fill pieces from the end; entry n is the first unit that the last n pieces can hold."""
        starts = [stop]
        while starts[-1] > start:
            end = starts[-1]
            starts.append(min(end - 1, bisect_left(self.opens_U, self.at_U1[end] - capacity, start, end)))
        return starts

    def _end(self, unit: int, stop: int, left: int, capacity: int) -> int:
        """Where the piece from `unit` on ends, if `left` pieces are left with it.

        As near as its capacity allows to the mean of what is left, so that the last piece is no small rest.
        """
        mean = self.opens_U[unit] + (self.at_U1[stop] - self.opens_U[unit]) / left
        after = bisect_left(self.at_U1, mean, unit + 1, stop)
        nearest = after if self.at_U1[after] - mean <= mean - self.at_U1[after - 1] else after - 1
        latest = min(self._full(unit, stop, capacity), stop - left + 1)  # the other pieces have a unit each
        return max(unit + 1, min(nearest, latest))

    def _full(self, unit: int, stop: int, capacity: int) -> int:
        """Where the longest piece from `unit` on ends."""
        return max(unit + 1, bisect_right(self.at_U1, self.opens_U[unit] + capacity, unit + 1, stop + 1) - 1)


def _beside(arranged: Arranged) -> np.ndarray:
    """Put prompts beside those, and a prompt's rows beside those of its own, with which they share most.

    Rows of another prompt never come between: they would part a prompt that is computed once where it stands together.
    """
    line_B = arranged.origins.order()
    return line_B[np.argsort(first_seen(arranged.families_B[line_B]), kind="stable")]


def _gains(arranged: Arranged, line_B: np.ndarray, cuts: list[list[int]], by_prompt: list[list[int]]) -> bool:
    """Whether micro-batches of this line compute fewer tokens than those prompt by prompt, and are no more."""
    if max(map(len, cuts)) > max(map(len, by_prompt)):
        return False
    return _spared(arranged, line_B, cuts) > _spared(arranged, np.arange(len(line_B)), by_prompt)


def _spared(arranged: Arranged, line_B: np.ndarray, cuts: list[list[int]]) -> int:
    """Count the tokens that rows of a micro-batch share, over those of all ranks."""
    starts = np.unique(np.concatenate(cuts))
    return arranged.spared(line_B, np.searchsorted(starts, np.arange(len(line_B)), side="right"))


def _lists(index_B: np.ndarray, cuts: list[list[int]]) -> list[list[list[int]]]:
    count = max(1, *(len(rank) - 1 for rank in cuts))
    return [_pieces(index_B, rank, count) for rank in cuts]


def _pieces(index_B: np.ndarray, cuts: list[int], count: int) -> list[list[int]]:
    pieces = [index_B[start:stop].tolist() for start, stop in pairwise(cuts)]
    return pieces + [[] for _ in range(count - len(pieces))]


def _shares(line_U1: np.ndarray, ranks: int) -> list[tuple[int, int]]:
    """First and last unit of each rank's share, each cut as near as possible to its place on the line."""
    ideal = line_U1[-1] * np.arange(1, ranks) / ranks
    after = np.searchsorted(line_U1, ideal)
    before = np.maximum(after - 1, 0)
    nearest = np.where(line_U1[after] - ideal <= ideal - line_U1[before], after, before)
    return list(pairwise([0, *nearest.tolist(), len(line_U1) - 1]))
