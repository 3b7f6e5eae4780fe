"""Which tokens of a run each rank has, where several ranks compute a micro-batch together (`sequence_parallel`).

The run is cut into consecutive shares whose sizes differ by one token at most: nothing is padded, and a cut may lie
anywhere in a row. (Only a run of fewer tokens than ranks is: the libraries' layers do not take none.) A response
token's log-prob is computed where the token lies that predicts it.

Suffixes: `_O` distinct response tokens that own tokens predict, `_U` distinct response tokens of the run, own ones or
not.
Left out: what ranks send each other (penstock/engines/kernels/sequence_parallel.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RankSet:
    """Consecutive ranks of a group that compute each micro-batch together; this process is one of them.

    Attributes:
        count: how many.
        own: this rank's number among them.
        group: their process group; None for a rank alone.
    """

    count: int
    own: int
    group: Any

    @property
    def answers(self) -> bool:
        """Whether it is this rank that tells what all of the set know."""
        return self.own == 0


ALONE = RankSet(1, 0, None)


@dataclass(frozen=True)
class Cut:
    """A run cut into shares, in host memory.

    Attributes:
        tokens: how many each rank has, at least one.
        own: which are this rank's.
        targets: how many response tokens each rank's tokens predict.
        own_O: which of them this rank's do, by their numbers in U.
        predict_O: the tokens that predict those, by their numbers among the own ones.
        place_U: where a response token lies among those of all ranks, one rank after the other.
    """

    tokens: tuple[int, ...]
    own: slice
    targets: tuple[int, ...]
    own_O: np.ndarray
    predict_O: np.ndarray
    place_U: np.ndarray


def cut(ranks: RankSet, tokens: int, predict_U: np.ndarray) -> Cut:
    """Cut a run into shares.

    Args:
        tokens: of the run.
        predict_U: the token of the run that predicts a response token.
    """
    tokens = max(tokens, ranks.count)
    bounds = [tokens * rank // ranks.count for rank in range(ranks.count + 1)]
    of_rank_U = np.searchsorted(bounds[1:], predict_U, side="right")
    by_rank_U = np.argsort(of_rank_U, kind="stable")
    own, own_O = slice(*bounds[ranks.own : ranks.own + 2]), np.flatnonzero(of_rank_U == ranks.own)
    place_U = np.empty_like(by_rank_U)
    place_U[by_rank_U] = np.arange(len(by_rank_U))
    return Cut(
        tokens=tuple(stop - start for start, stop in pairwise(bounds)),
        own=own,
        targets=tuple(np.bincount(of_rank_U, minlength=ranks.count).tolist()),
        own_O=own_O,
        predict_O=predict_U[own_O] - own.start,
        place_U=place_U,
    )
