"""Sequences side by side, those of about the same length together: for layers that compute whole rows, padded.

Behind a row as long as the longest of a micro-batch most would be padding, and a layer that computes it keeps it for
its backward pass as well. Sequences whose chunks are within a factor of two go together, so at most half of the chunks
are padding, whatever the lengths; a row much shorter than a chunk may be computed as a whole one. The lengths
are known on the host: no device is waited for.

Suffixes as in packing.py, and `_G` the keys of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.base.ragged import offsets_of
from penstock.engines.batches.trees import into

CHUNK = 64  # tokens that such a layer computes together, padded if there are fewer: as the delta rule has it


@dataclass(frozen=True)
class RowGroup:
    """Sequences side by side, as many as `rows`, as long as the longest of them."""

    rows: int
    longest: int
    keys_G: torch.Tensor | None  # int64, index into K, in the order of the run; None: all of them
    slots_G: torch.Tensor  # row x longest + position

    def side_by_side(self, tensor_K: torch.Tensor) -> torch.Tensor:
        """Return the group's of [K, ...] as rows, [rows, longest, ...], with zeros behind each."""
        slots = tensor_K.new_zeros(self.rows * self.longest, *tensor_K.shape[1:])
        own = tensor_K if self.keys_G is None else tensor_K.index_select(0, self.keys_G)
        return slots.index_copy(0, self.slots_G, own).view(self.rows, self.longest, *tensor_K.shape[1:])

    def in_one_run(self, rows: torch.Tensor) -> torch.Tensor:
        """Return of rows [rows, longest, ...] the keys [G, ...]."""
        return rows.flatten(0, 1).index_select(0, self.slots_G)


@dataclass(frozen=True)
class RowGroups:
    """All sequences of a micro-batch, in groups."""

    groups: tuple[RowGroup, ...]
    order_K: torch.Tensor | None  # where a key lies among those of all groups, one after another; None: where it is


def group_rows(lengths_S: np.ndarray, put: Callable[[np.ndarray], torch.Tensor]) -> RowGroups:
    """Put sequences of these lengths, which lie one after another, into groups; `put` copies to the device."""
    kinds_S = np.ceil(np.log2(-(-lengths_S // CHUNK))).astype(np.int64)
    starts_S, groups, keys = offsets_of(lengths_S)[:-1], [], []
    kinds = np.unique(kinds_S)
    for kind in kinds:
        lengths_R = lengths_S[kinds_S == kind]
        longest = int(lengths_R.max())
        keys.append(into(starts_S[kinds_S == kind], lengths_R))
        slots_G = into(np.arange(len(lengths_R)) * longest, lengths_R)
        keys_G = put(keys[-1]) if len(kinds) > 1 else None
        groups.append(RowGroup(len(lengths_R), longest, keys_G, put(slots_G)))
    if len(groups) == 1:
        return RowGroups(tuple(groups), None)
    order_K = np.empty(int(lengths_S.sum()), np.int64)
    order_K[np.concatenate(keys)] = np.arange(len(order_K))
    return RowGroups(tuple(groups), put(order_K))
