"""A run that ranks compute together is dealt out whole: every token once, every response token where it is predicted.

Indices alone, on a tree of rows and on rows that share prompts, for more ranks than there are tokens as well.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engines.batches.packing import PackedBatch, Rows, Share, pack
from penstock.engines.batches.shares import RankSet
from tests.engines.rows import branched_rows, random_rows, take_rows

CPU = torch.device("cpu")
SOME = {"branched": branched_rows(), "shared": random_rows(8, samples=2), "one": take_rows(random_rows(2), [0])}


def _packed(rows: Rows, count: int) -> tuple[list[PackedBatch], list[Share]]:
    every = list(range(len(rows)))
    batches = [pack(rows, every, CPU, RankSet(count, own, None)) for own in range(count)]
    shares = [batch.layout.share for batch in batches if batch.layout.share is not None]
    assert len(shares) == count
    return batches, shares


@pytest.mark.parametrize("count", [2, 3, 4, 40])
@pytest.mark.parametrize("name", sorted(SOME))
def test_every_token_is_one_ranks(name: str, count: int) -> None:
    """In order, in shares that differ by one token; all else of the run is the same on each rank.

    More ranks than tokens have one each, of which what is beyond the run is nobody's.
    """
    whole = pack(SOME[name], list(range(len(SOME[name]))), CPU)
    batches, shares = _packed(SOME[name], count)
    run = len(whole.tokens_N)
    assert torch.equal(torch.cat([batch.tokens_N for batch in batches])[:run], whole.tokens_N)
    assert torch.equal(torch.cat([batch.positions_N for batch in batches])[:run], whole.positions_N)
    assert sum(shares[0].tokens) == max(run, count)
    assert {share.run for share in shares} == {run}
    assert {share.tokens for share in shares} == {tuple(len(batch.tokens_N) for batch in batches)}
    assert max(shares[0].tokens) - min(shares[0].tokens) <= 1
    for batch in batches:
        assert torch.equal(batch.layout.cu_keys_S1, whole.layout.cu_keys_S1)
        assert torch.equal(batch.mask_T, whole.mask_T)
        assert batch.computed == whole.computed


@pytest.mark.parametrize("count", [2, 3, 4, 40])
@pytest.mark.parametrize("name", sorted(SOME))
def test_every_response_token_is_computed_where_it_is_predicted(name: str, count: int) -> None:
    """What the ranks have, one after the other, is what a rank alone has. Control: without the order it is not."""
    whole = pack(SOME[name], list(range(len(SOME[name]))), CPU)
    batches, shares = _packed(SOME[name], count)
    begins = np.cumsum([0, *shares[0].tokens])
    predict = torch.cat([share.predict_O + int(begin) for share, begin in zip(shares, begins, strict=False)])
    targets = torch.cat([share.targets_O for share in shares])
    predict_U, targets_U = whole.own
    for share, batch in zip(shares, batches, strict=True):
        assert share.targets == tuple(len(other.targets_O) for other in shares)
        assert torch.equal(predict[share.place_U], predict_U)
        assert torch.equal(targets[share.place_U], targets_U)
        assert torch.equal(batch.own[1], share.targets_O)
    rows = torch.arange(len(predict_U)).flip(0)
    assert len(rows) == 1 or not torch.equal(predict[shares[0].place_U[rows]], predict_U)


def test_a_rank_alone_has_no_share() -> None:
    assert pack(SOME["shared"], [0, 1], CPU).layout.share is None
