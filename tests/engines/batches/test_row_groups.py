"""Sequences side by side: every key in its place, and little padding whatever their lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engines.batches.row_groups import CHUNK, group_rows


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_whole_and_less_than_half_of_them_is_padding(seed: int) -> None:
    """In chunks. Control: as one group, more than half would be."""
    lengths_S = np.random.default_rng(seed).lognormal(4.5, 1.2, 40).astype(np.int64) + 1
    found = group_rows(lengths_S, torch.from_numpy)
    keys_K = torch.arange(int(lengths_S.sum()))
    back = torch.cat([group.in_one_run(group.side_by_side(keys_K)) for group in found.groups])
    assert found.order_K is not None and back[found.order_K].equal(keys_K)
    first, bounds_S1 = found.groups[0], np.concatenate([[0], np.cumsum(lengths_S)])
    row = first.side_by_side(keys_K)[0]
    number = int(np.searchsorted(bounds_S1, int(row[0]), side="right")) - 1
    assert row[: lengths_S[number]].tolist() == list(range(bounds_S1[number], bounds_S1[number + 1]))
    chunks = int((-(-lengths_S // CHUNK)).sum())
    computed = sum(group.rows * -(-group.longest // CHUNK) for group in found.groups)
    assert computed < 2 * chunks < len(lengths_S) * -(-int(lengths_S.max()) // CHUNK)


def test_rows_of_like_length_are_one_group_in_their_order() -> None:
    """So nothing is moved for them. Control: one that is longer than twice the others."""
    assert group_rows(np.array([40, 64, 50]), torch.from_numpy).order_K is None
    assert group_rows(np.array([40, 64, 129]), torch.from_numpy).order_K is not None
