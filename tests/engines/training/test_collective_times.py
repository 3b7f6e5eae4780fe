"""The time of collectives: the union of what overlaps, taken of every collective, and of the update unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engines.families.shape import read_shape
from penstock.engines.sizing.flops import forward_flops, training_flops
from penstock.engines.training.collective_times import covered
from tests.engines.rows import LOSS, SPLIT, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape

FolderOf = Callable[[Shape], Path]


def test_time_that_collectives_share_counts_once() -> None:
    """Apart, touching, inside one another, overlapping; in any order."""
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (2, 3), (0.5, 1), (5.5, 8)]) == 6


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_reports_its_work_and_the_time_of_its_collectives(
    stage: int, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Tokens and FLOPs are those of all ranks, for as many passes as there are epochs; a forward pass is a third.

    Collectives take some of the time, and the functions that were wrapped are whole afterwards: the inspection finds
    as many as it looks for.
    """
    folder, bare = folder_of(Shape("qwen3", tied=True)), random_rows(8)
    rows = with_columns(bare, {"values": bare.columns["returns"].values_T})
    path, shape = write_rows(tmp_path / "rows.parquet", rows), read_shape(folder)
    lengths, shared_B = (rows.prompts.lengths_B, rows.responses.lengths_B), rows.shared_B
    two_ranks.build(folder, actor={"zero_stage": stage})
    split = {**SPLIT, "micro_batch_tokens": 64, "epochs": 2}
    two_ranks.ask("update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=1e-3)
    for used in two_ranks.usage:
        assert used["tokens"] == 2 * rows.lengths_B.sum()
        assert used["flops"] == 2 * training_flops(shape, *lengths, scalar_head=False, shared_B=shared_B)
        assert 0 < used["communication_s"] < used["seconds"]
        assert "allocated_gib" not in used  # no GPU
    assert two_ranks.ask("wrapped_collectives")[0] == {"names": []}
    two_ranks.ask("logprobs", path=path, role="actor", temperature=1.0, budget=64)
    assert two_ranks.usage[0]["flops"] == forward_flops(shape, *lengths, scalar_head=False, shared_B=shared_B)
    assert "communication_s" not in two_ranks.usage[0]


def test_every_kind_of_collective_is_timed(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """A synchronous one until it returns, an asynchronous one until it is waited for, one of DeepSpeed's own."""
    two_ranks.build(folder_of(Shape("qwen3", tied=True)))
    (first, second) = two_ranks.ask("timed_collectives_of", pause_s=0.6)
    # Rank 1 comes late to each of three collectives: rank 0 waits in them, rank 1 does not.
    assert first["seconds"] > 1.7
    assert second["seconds"] < 0.9
