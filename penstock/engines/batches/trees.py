"""Which rows begin with the same tokens, to be computed once: samples of a prompt, branches of a conversation.

A row takes its first tokens from a row before it, that one from another in turn: a tree, in which nothing is cut. The
samples of a prompt take it from the first of them. Beyond that, and across prompts, a row takes what it shares with any
row before it from `LEAST` tokens on: it then begins where it leaves that row, and the tokens computed are the nodes of
the tree. Branching costs nothing in attention, which runs over each row's keys once either way; the bound keeps rows
that agree by chance as they are.

Few rows share that much, or none. Which they may be is seen from `LEAST` tokens of each, and they alone are compared.

Suffixes: `_B` rows, `_C` those that are alike, `_N` those looked at, `_NL` times `LEAST`, `_R` tokens of all rows,
whole, one row after the other.
Left out: where what is computed lies in a run (penstock/engines/batches/packing.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.base.ragged import Ragged

LEAST = 64  # tokens that a row must save beyond its prompt
WEIGHTS = np.cumprod(np.full(LEAST, 0x9E3779B97F4A7C15, np.uint64))  # powers of an odd number, modulo 2^64


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
        if not self.beyond_prompts:  # the first row of a prompt takes nothing
            return source_R
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


@dataclass(frozen=True)
class Alike:
    """Rows that may share more than prompts, in the order of their bytes: there a row shares most with its neighbours.

    Attributes:
        row_C: which rows they are.
        common_C: first tokens that each has in common with the one before it in that order; 0 for the first.
    """

    row_C: np.ndarray
    common_C: np.ndarray

    def placed(self, place_B: np.ndarray) -> Alike:
        """Return the same where row i is in another place."""
        return Alike(place_B[self.row_C], self.common_C)

    def apart(self, parts_B: np.ndarray) -> Alike:
        """Return the rows part by part; those of different parts have nothing in common."""
        order_C = np.argsort(parts_B[self.row_C], kind="stable")
        row_C, before_C, after_C = self.row_C[order_C], order_C[:-1], order_C[1:]
        # What two rows have in common is the least of what neighbours between them have.
        ranges = np.stack([before_C + 1, after_C + 1], axis=1).reshape(-1)
        least_C = np.minimum.reduceat(np.append(self.common_C, 0), ranges)[::2]
        same_C = parts_B[row_C[1:]] == parts_B[row_C[:-1]]
        return Alike(row_C, np.append(0, np.where(same_C, least_C, 0)))

    def nearest(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row the one before it with which it shares the most first tokens, and how many; 0: none.

        Rows are taken out of the order of bytes, the last row first: its neighbours are then rows before it.
        """
        count, rows = len(self.row_C), [*self.row_C.tolist(), -1]
        # Behind the last entry and before the first one, -1, is the same entry, with which nothing is shared.
        left, right, common = list(range(-1, count)), list(range(1, count + 2)), [*self.common_C.tolist(), 0]
        donor_C, most_C = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for at in np.argsort(-self.row_C).tolist():
            before, after = left[at], right[at]
            to_left = common[at] >= common[after]
            donor_C[at], most_C[at] = rows[before if to_left else after], max(common[at], common[after])
            right[before], left[after], common[after] = after, before, min(common[at], common[after])
        return donor_C, most_C


def origins_of(alike: Alike, prompts_B: np.ndarray, families_B: np.ndarray, parts_B: np.ndarray) -> Origins:
    """Find out where rows get their first tokens from.

    Args:
        alike: the rows that may share more than prompts.
        prompts_B: tokens of the prompts.
        families_B: the same for rows of the same prompt, which follow each other.
        parts_B: 0, 0, 1, ... the run that a row is in; rows of different runs share nothing.
    """
    opens_B = (np.diff(families_B, prepend=-1) != 0) | (np.diff(parts_B, prepend=-1) != 0)
    of_prompt_B = np.where(opens_B, 0, prompts_B)
    donor_B, shared_B = np.flatnonzero(opens_B)[np.cumsum(opens_B) - 1], of_prompt_B.copy()
    if len(alike.row_C):
        alike = alike.apart(parts_B)
        donor_C, common_C = alike.nearest()
        takes_C = common_C - of_prompt_B[alike.row_C] >= LEAST
        donor_B[alike.row_C[takes_C]] = donor_C[takes_C]
        shared_B[alike.row_C[takes_C]] = common_C[takes_C]
    return Origins(donor_B, shared_B, of_prompt_B)


def alike_of(prompts: Ragged, responses: Ragged, families_B: np.ndarray, index_B: np.ndarray) -> Alike:
    """Find the rows that may share more than prompts; every row that does is among them.

    Args:
        prompts, responses: of all rows.
        families_B: 0, 0, 1, ... the same for rows of the same prompt, which follow each other.
        index_B: the rows to look at; they are numbered as they stand here.
    """
    whole_B = _in_responses(responses, families_B, index_B)
    across_F = _across_prompts(prompts, responses, families_B, index_B)
    row_C = np.flatnonzero(whole_B | across_F[families_B])
    if not len(row_C):
        return Alike(row_C, row_C)
    _, first_C, family_C = np.unique(families_B[row_C], return_index=True, return_inverse=True)
    texts = [prompts.row(row).tobytes() for row in index_B[row_C[first_C]].tolist()]
    if _nested(texts):
        whole_B |= across_F[families_B]
    rows = zip(family_C.tolist(), index_B[row_C].tolist(), whole_B[row_C].tolist(), strict=True)
    keys = [texts[at] + responses.row(row).tobytes() if whole else texts[at] for at, row, whole in rows]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [0, *(_common(keys[one], keys[other], prompts.values_T.dtype) for one, other in pairwise(order))]
    return Alike(row_C[order], np.array(common, dtype=np.int64))


def _nested(texts: list[bytes]) -> bool:
    """Whether one begins with another one. Where none does, rows of two prompts part within these."""
    return any(longer.startswith(shorter) for shorter, longer in pairwise(sorted(texts)))


def _in_responses(responses: Ragged, families_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """Tell rows of a prompt whose responses begin with the same `LEAST` tokens."""
    found_B = np.zeros(len(index_B), dtype=bool)
    row_N = np.flatnonzero(responses.lengths_of(index_B) >= LEAST)
    if len(row_N):
        windows = np.lib.stride_tricks.sliding_window_view(responses.values_T, LEAST)
        sums_N = _sums(windows[responses.offsets_B1[index_B[row_N]]])
        found_B[row_N] = _repeated(sums_N + families_B[row_N].astype(np.uint64))
    return found_B


def _across_prompts(prompts: Ragged, responses: Ragged, families_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """Tell the families with a row that may have its first `LEAST` tokens in common with one of another family.

    Of a longer prompt one row stands for all.
    """
    prompts_B, opens_B = prompts.lengths_of(index_B), np.diff(families_B, prepend=-1) != 0
    found_F = np.zeros(np.count_nonzero(opens_B), dtype=bool)
    row_N = np.flatnonzero((opens_B | (prompts_B < LEAST)) & (prompts_B + responses.lengths_of(index_B) >= LEAST))
    found_F[families_B[row_N][_repeated(_sums(_beginnings(prompts, responses, index_B[row_N])))]] = True
    return found_F


def _beginnings(prompts: Ragged, responses: Ragged, row_N: np.ndarray) -> np.ndarray:
    """The first `LEAST` tokens of prompts with their responses, which have as many."""
    of_prompt_N = np.minimum(prompts.lengths_of(row_N), LEAST)
    tokens_NL = np.empty((len(row_N), LEAST), dtype=prompts.values_T.dtype)
    in_prompt_NL = np.arange(LEAST) < of_prompt_N[:, None]
    tokens_NL[in_prompt_NL] = prompts.values_T[into(prompts.offsets_B1[row_N], of_prompt_N)]
    tokens_NL[~in_prompt_NL] = responses.values_T[into(responses.offsets_B1[row_N], LEAST - of_prompt_N)]
    return tokens_NL


def _sums(tokens_NL: np.ndarray) -> np.ndarray:
    """A number for the tokens, the same where they are: others that have it by chance are looked at in vain."""
    return tokens_NL.astype(np.uint64) @ WEIGHTS[:LEAST]


def _repeated(sums_N: np.ndarray) -> np.ndarray:
    """Tell the numbers that are there more than once."""
    order_N = np.argsort(sums_N, kind="stable")
    same = np.diff(sums_N[order_N]) == 0
    repeated_N = np.zeros(len(sums_N), dtype=bool)
    repeated_N[order_N[1:][same]] = repeated_N[order_N[:-1][same]] = True
    return repeated_N


def _common(one: bytes, other: bytes, dtype: np.dtype) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(other)) // dtype.itemsize
    if one is other:
        return length
    differs_T = np.frombuffer(one, dtype, length) != np.frombuffer(other, dtype, length)
    return int(differs_T.argmax()) if differs_T.any() else length


def into(starts_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Return flat destinations of rows that begin at `starts` and have `lengths` entries."""
    ends_B = np.cumsum(lengths_B, dtype=np.int64)
    return np.repeat(starts_B - ends_B + lengths_B, lengths_B) + np.arange(int(lengths_B.sum()))
