"""Which rows begin with the same tokens, to be computed once: samples of a prompt, branches of a conversation.

A row takes its first tokens from a row before it, that one from another in turn: a tree, in which nothing is cut. The
samples of a prompt take it from the first of them. Beyond that, and across prompts, a row takes what it shares with any
row before it from `LEAST` tokens on: it then begins where it leaves that row, and the tokens computed are the nodes of
the tree. Branching costs nothing in attention, which runs over each row's keys once either way; the bound keeps rows
that agree by chance as they are, and rows of less tokens are not even looked at.

Suffixes: `_B` rows, `_R` tokens of all rows, whole, one row after the other.
Left out: where what is computed lies in a run (penstock/engines/batches/packing.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.base.ragged import Ragged

LEAST = 64  # tokens that a row must save beyond its prompt


@dataclass(frozen=True)
class Origins:
    """Where rows get their first tokens from.

    Attributes:
        donor_B: a row before this one, or itself where it takes nothing.
        shared_B: tokens that are the donor's.
        prompts_B: those that would be shared if only equal prompts were.
    """

    donor_B: np.ndarray
    shared_B: np.ndarray
    prompts_B: np.ndarray

    @property
    def beyond_prompts(self) -> int:
        """Tokens that are spared besides those of equal prompts."""
        return int((self.shared_B - self.prompts_B).sum())

    def sources(self, starts_B: np.ndarray, tokens: int) -> np.ndarray:
        """Return for each token of all rows the one that is computed for it, by number in R."""
        source_R = np.arange(tokens)
        for_R = into(starts_B, self.shared_B)
        source_R[for_R] = into(starts_B[self.donor_B], self.shared_B)
        while not np.array_equal(further_R := source_R[source_R], source_R):  # a donor's token may be another's
            source_R = further_R
        return source_R

    def order(self) -> np.ndarray:
        """Return the rows so that each stands as near as can be to those that it shares most with.

        Where only prompts are shared that is the order that they have.
        """
        count = len(self.donor_B)
        if not self.beyond_prompts:
            return np.arange(count)
        roots: list[int] = []
        takers: list[list[int]] = [[] for _ in range(count)]
        for row in np.argsort(-self.shared_B, kind="stable").tolist():
            (takers[self.donor_B[row]] if self.shared_B[row] else roots).append(row)
        order, waiting = [], roots[::-1]
        while waiting:
            order.append(row := waiting.pop())
            waiting.extend(reversed(takers[row]))
        return np.array(order, dtype=np.int64)


def origins_of(whole: Ragged, prompts_B: np.ndarray, families_B: np.ndarray) -> Origins:
    """Find out where rows get their first tokens from.

    Args:
        whole: prompts with their responses.
        prompts_B: tokens of the prompts.
        families_B: 0, 0, 1, ... the same for rows of the same prompt, which follow each other.
    """
    first_B = np.searchsorted(families_B, families_B)
    of_prompt_B = np.where(first_B == np.arange(len(first_B)), 0, prompts_B)
    donor_B, shared_B = first_B.copy(), of_prompt_B.copy()
    if (whole.lengths_B - of_prompt_B >= LEAST).any():
        long_C = np.flatnonzero(whole.lengths_B >= LEAST)
        donor_C, common_C = _nearest(whole.take(long_C))
        takes_C = common_C - of_prompt_B[long_C] >= LEAST
        donor_B[long_C[takes_C]] = long_C[donor_C[takes_C]]
        shared_B[long_C[takes_C]] = common_C[takes_C]
    return Origins(donor_B, shared_B, of_prompt_B)


def _nearest(rows: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the one before it with which it shares the most first tokens, and how many; -1 and 0: none.

    In the order of their bytes a row shares most with its neighbours. So rows are taken out of that order, the last
    row first: its neighbours are then rows before it.
    """
    count = len(rows)
    sorted_ = sorted(range(count), key=[rows.row(row).tobytes() for row in range(count)].__getitem__)
    # Both ends of the line are row -1, with which nothing is shared.
    left, right, common_left = dict.fromkeys([-1], -1), dict.fromkeys([-1], -1), {-1: 0}
    for a, b in zip([-1, *sorted_], [*sorted_, -1], strict=True):
        right[a], left[b] = b, a
        common_left[b] = _common(rows.row(a), rows.row(b)) if min(a, b) >= 0 else 0
    donor_B, common_B = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for row in reversed(range(count)):
        before, after = left[row], right[row]
        with_before, with_after = common_left[row], common_left[after]
        donor_B[row], common_B[row] = (before, with_before) if with_before >= with_after else (after, with_after)
        right[before], left[after], common_left[after] = after, before, min(with_before, with_after)
    return donor_B, common_B


def _common(a_T: np.ndarray, b_T: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(a_T), len(b_T))
    differs_T = a_T[:length] != b_T[:length]
    return int(differs_T.argmax()) if differs_T.any() else length


def into(starts_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Return flat destinations of rows that begin at `starts` and have `lengths` entries."""
    ends_B = np.cumsum(lengths_B, dtype=np.int64)
    return np.repeat(starts_B - ends_B + lengths_B, lengths_B) + np.arange(int(lengths_B.sum()))
