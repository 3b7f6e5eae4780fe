"""Samples of several conversations: the loss sees samples, a forward pass sees their paths.

An agent's episode may branch, compact its history or begin anew (penstock/engines/rollout/paths/places.py). Its paths
are one row of the experience, so that whatever is counted by samples needs to know nothing of them: groups, rewards,
mini-batches, the means of a loss. They stay in one micro-batch, in which each is a sequence of its own, with a prompt
of its own; what they have in common is computed once (penstock/engines/batches/trees.py).

Suffixes: `_B` rows, `_P` paths of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.base.ragged import Ragged, offsets_of
from penstock.engines.batches.trees import into
from penstock.state.experience import PATH_ENDS, PATH_PROMPT_ENDS, PATH_PROMPTS


@dataclass(frozen=True)
class Paths:
    """The conversations of rows, row by row.

    Attributes:
        prompts: of each, whole.
        responses: what is behind it; all those of a row are the row's response.
        first_B1: the number of a row's first one.
    """

    prompts: Ragged
    responses: Ragged
    first_B1: np.ndarray

    @property
    def counts_B(self) -> np.ndarray:
        """How many a row has."""
        return np.diff(self.first_B1)

    def of_rows(self, index_B: np.ndarray) -> np.ndarray:
        """Return the numbers of the paths of rows, in their order."""
        return into(self.first_B1[index_B], self.counts_B[index_B])

    def take(self, index_B: np.ndarray) -> Paths:
        """Return those of some of the rows, in the order given."""
        index_P = self.of_rows(index_B)
        return Paths(self.prompts.take(index_P), self.responses.take(index_P), offsets_of(self.counts_B[index_B]))

    def further_prompts_of(self, index_B: np.ndarray) -> np.ndarray:
        """Return how many tokens the prompts of rows have but for the first one of each."""
        starts_P1 = self.prompts.offsets_B1
        return starts_P1[self.first_B1[index_B + 1]] - starts_P1[self.first_B1[index_B] + 1]


def paths_of(prompts: Ragged, responses: Ragged, columns: Mapping[str, Ragged]) -> Paths | None:
    """Return the paths that columns of the experience tell of; None: every row is one.

    Args:
        prompts: of the first path of each row.
    """
    ends, others, other_ends = (columns[name] for name in (PATH_ENDS, PATH_PROMPTS, PATH_PROMPT_ENDS))
    first_B1 = ends.offsets_B1
    if len(ends.values_T) == len(ends):
        return None
    lengths_P = np.diff(ends.values_T, prepend=0).astype(np.int64)
    lengths_P[first_B1[:-1]] = ends.values_T[first_B1[:-1]]
    own_P = np.diff(other_ends.values_T, prepend=0).astype(np.int64)
    opens_B = other_ends.offsets_B1[:-1][other_ends.lengths_B > 0]
    own_P[opens_B] = other_ends.values_T[opens_B]
    prompt_lengths_P = np.empty(len(lengths_P), np.int64)
    is_first_P = np.zeros(len(lengths_P), bool)
    is_first_P[first_B1[:-1]] = True
    prompt_lengths_P[is_first_P], prompt_lengths_P[~is_first_P] = prompts.lengths_B, own_P
    whole = Ragged(np.empty(int(prompt_lengths_P.sum()), prompts.values_T.dtype), offsets_of(prompt_lengths_P))
    starts_P = whole.offsets_B1[:-1]
    whole.values_T[into(starts_P[is_first_P], prompts.lengths_B)] = prompts.values_T
    whole.values_T[into(starts_P[~is_first_P], own_P)] = others.values_T
    return Paths(whole, Ragged(responses.values_T, offsets_of(lengths_P)), first_B1)
