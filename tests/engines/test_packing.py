"""Every row is in exactly one micro-batch, every token where the forward pass looks for it, and nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engines.packing import Rows, pack, partition, plan_micro_batches
from state.experience import Ragged

CPU = torch.device("cpu")


def _rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Rows:
    """Rows whose column `mark` holds ten times the token it belongs to."""
    answers = Ragged.of(responses, np.int32)
    return Rows(
        prompts=Ragged.of(prompts, np.int32),
        responses=answers,
        mask=Ragged(np.ones(len(answers.values_T), np.uint8), answers.offsets_B1),
        columns={"mark": Ragged(answers.values_T.astype(np.float32) * 10, answers.offsets_B1)},
    )


ROWS = _rows([[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11], [12]])


def _lengths(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(1, 60, count)


# ---- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_a_plan_holds_every_row_once_and_as_many_micro_batches_on_every_rank(
    ranks: int, count: int, budget: int
) -> None:
    """A row that is lost or counted twice changes the gradient; a rank with another count waits for ever."""
    plan = plan_micro_batches(_lengths(count), ranks, budget)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    rows = [row for micro_batches in plan for micro_batch in micro_batches for row in micro_batch]
    assert sorted(rows) == list(range(count))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_exceeds_the_budget_only_by_a_row_that_does(ranks: int) -> None:
    """The budget is what memory was planned for; a row alone above it cannot be split."""
    lengths = np.append(_lengths(50), 200)
    plan = plan_micro_batches(lengths, ranks, 64)
    loads = [(int(lengths[micro].sum()), len(micro)) for micro_batches in plan for micro in micro_batches]
    assert all(load <= 64 for load, rows in loads if rows > 1)
    assert [load for load, rows in loads if rows == 1 and load > 64] == [200]


def test_a_large_budget_needs_one_micro_batch_and_a_small_one_as_many_as_tokens_demand() -> None:
    """No forward pass is wasted: a plan far above the tokens' own minimum would be slow, and still correct."""
    lengths = _lengths(100)
    assert len(plan_micro_batches(lengths, 2, 10_000)[0]) == 1
    fewest = -(-int(lengths.sum()) // (2 * 128))
    assert fewest <= len(plan_micro_batches(lengths, 2, 128)[0]) <= fewest + 2


def test_fewer_rows_than_places_leave_places_empty() -> None:
    """Three rows on two ranks, one row at a time: the fourth place is empty, and still there."""
    plan = plan_micro_batches(np.array([5, 6, 7]), 2, 1)
    assert sorted(len(micro) for micro_batches in plan for micro in micro_batches) == [0, 1, 1, 1]


def test_ranks_get_nearly_equal_loads() -> None:
    """The heaviest rank decides when a step ends. Control: rows dealt out in order are much further apart."""
    lengths = np.sort(_lengths(64))[::-1].copy()
    plan = plan_micro_batches(lengths, 4, 256)
    loads = [sum(int(lengths[micro].sum()) for micro in micro_batches) for micro_batches in plan]
    dealt = [int(part.sum()) for part in np.array_split(lengths, 4)]
    assert max(loads) / min(loads) < 1.1 < max(dealt) / min(dealt)


def test_the_plan_depends_on_the_lengths_alone() -> None:
    """Every rank plans by itself: ties must fall the same way everywhere."""
    lengths = np.full(9, 4)
    assert partition(lengths, 4) == [[0, 4, 8], [1, 5], [2, 6], [3, 7]]
    assert plan_micro_batches(lengths, 2, 12) == plan_micro_batches(lengths.copy(), 2, 12)


# ---- a packed micro-batch ------------------------------------------------------------------------------------------


def test_prompts_and_responses_lie_one_after_the_other_without_padding() -> None:
    """Tokens, positions, row borders and per-token columns against hand values, in the order asked for."""
    batch = pack(ROWS, [2, 0], CPU)
    assert batch.tokens_N.tolist() == [5, 6, 12, 1, 2, 3, 7, 8]
    assert batch.positions_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.layout.cu_seqlens_B1.tolist() == [0, 3, 8]
    assert (batch.layout.rows, batch.layout.max_length) == (2, 5)
    assert batch.targets_T.tolist() == [12, 7, 8]
    assert batch.offsets_B1.tolist() == [0, 1, 3]
    assert batch.mask_T.tolist() == [1.0, 1.0, 1.0]
    assert batch.columns["mark"].tolist() == [120.0, 70.0, 80.0]
    assert batch.layout.slots_N is not None
    assert batch.layout.slots_N.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


def test_each_response_token_is_predicted_from_the_token_before_it() -> None:
    """An index off by one would score every token by its successor's distribution."""
    batch = pack(ROWS, [1, 0, 2], CPU)
    assert batch.tokens_N[batch.predict_T].tolist() == [4, 9, 10, 3, 7, 6]
    assert batch.tokens_N[batch.predict_T + 1].tolist() == batch.targets_T.tolist()


def test_an_empty_micro_batch_runs_and_counts_nothing() -> None:
    """It has tokens, so the forward pass and its collectives happen, and a mask of zeros."""
    batch = pack(ROWS, [], CPU)
    assert batch.tokens_N.tolist() == [1, 2, 3, 7, 8]
    assert batch.mask_T.tolist() == [0.0, 0.0]
    assert pack(ROWS, [0], CPU).mask_T.tolist() == [1.0, 1.0]


def test_the_mask_of_the_file_is_kept() -> None:
    """A token that is not the model's own (a tool's answer) stays uncounted."""
    masked = Rows(ROWS.prompts, ROWS.responses, Ragged.of([[1, 0], [0, 1, 1], [0]], np.uint8), {})
    assert pack(masked, [0, 1, 2], CPU).mask_T.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
