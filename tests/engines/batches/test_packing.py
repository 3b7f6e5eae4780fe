"""Every row is in exactly one micro-batch, every token where the forward pass looks for it, and nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedInTurn, Rows, pack
from tests.engines.rows import planned

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


def _planned(count: int, samples: int = 1) -> Rows:
    """Rows of random lengths, `samples` in a row with one prompt."""
    random = np.random.default_rng(count)
    prompts = [random.integers(0, 1 << 30, random.integers(1, 30)) for _ in range(-(-count // samples))]
    responses = [np.zeros(random.integers(1, 30), np.int32) for _ in range(count)]
    return _rows([prompts[row // samples].tolist() for row in range(count)], [row.tolist() for row in responses])


def _load(rows: Rows, micro_batch: list[int]) -> int:
    """Tokens of a packed run, counted by packing it."""
    return len(pack(rows, micro_batch, CPU).tokens_N) if micro_batch else 0


# ---- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("budget", [1, 64, 10_000])
@pytest.mark.parametrize("samples", [1, 4])
def test_a_plan_holds_every_row_once_and_as_many_micro_batches_on_every_rank(
    ranks: int, count: int, budget: int, samples: int
) -> None:
    """A row that is lost or counted twice changes the gradient; a rank with another count waits for ever."""
    plan = plan_micro_batches(_planned(count, samples), ranks, budget)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    rows = [row for micro_batches in plan for micro_batch in micro_batches for row in micro_batch]
    assert sorted(rows) == list(range(count))


def test_a_plan_of_some_rows_holds_those_by_their_own_numbers() -> None:
    """A mini-batch is a part of the experience: numbers that counted within the part would train other rows."""
    plan = plan_micro_batches(_planned(20, 2), 2, 64, np.array([4, 5, 16, 17, 10, 11]))
    assert sorted(row for micro_batches in plan for micro in micro_batches for row in micro) == [4, 5, 10, 11, 16, 17]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("samples", [1, 5])
def test_a_micro_batch_exceeds_the_budget_only_by_a_row_that_does(ranks: int, samples: int) -> None:
    """The budget is what memory was planned for; a row alone above it cannot be split."""
    rows = _planned(50, samples)
    long = _rows([[-1]], [[0] * 200])
    rows = Rows(
        *(_joined(getattr(rows, name), getattr(long, name)) for name in ("prompts", "responses", "mask")), columns={}
    )
    plan = plan_micro_batches(rows, ranks, 64)
    loads = [(_load(rows, micro), len(micro)) for micro_batches in plan for micro in micro_batches]
    assert all(load <= 64 for load, count in loads if count > 1)
    assert [load for load, count in loads if count == 1 and load > 64] == [201]


def _joined(first: Ragged, second: Ragged) -> Ragged:
    return Ragged.of([column.row(row) for column in (first, second) for row in range(len(column))], np.int32)


def test_a_large_budget_needs_one_micro_batch_and_a_small_one_as_many_as_tokens_demand() -> None:
    """No forward pass is wasted: a plan far above the tokens' own minimum would be slow, and still correct."""
    rows = _planned(100)
    assert len(plan_micro_batches(rows, 2, 10_000)[0]) == 1
    fewest = -(-int(rows.lengths_B.sum()) // (2 * 256))
    assert fewest <= len(plan_micro_batches(rows, 2, 256)[0]) <= fewest + 2


def _long_tailed(count: int, samples: int) -> Rows:
    """Rows with a prompt of 16 tokens and a few responses much longer than most."""
    random = np.random.default_rng(count)
    lengths = np.minimum(random.lognormal(3, 1, count).astype(int) + 1, 240)
    prompts = [[row // samples] * 16 for row in range(count)]
    return _rows(prompts, [[count + row] * int(length) for row, length in enumerate(lengths)])


@pytest.mark.parametrize("samples", [1, 8])
def test_a_long_tail_needs_no_more_micro_batches_than_filling_them_one_by_one(samples: int) -> None:
    """The heaviest of them says nothing of the others. Control: cuts at equal distances need far more to respect it."""
    rows = _long_tailed(400, samples)
    micro_batches = plan_micro_batches(rows, 1, 256)[0]
    filled: list[list[int]] = [[]]
    for row in range(len(rows)):
        if _load(rows, [*filled[-1], row]) > 256:
            filled.append([])
        filled[-1].append(row)
    assert len(micro_batches) == len(filled)
    ends_B = np.cumsum(rows.responses.lengths_B)
    for count in range(len(filled), int(1.3 * len(filled))):
        cuts = np.searchsorted(ends_B, ends_B[-1] * np.arange(1, count) / count)
        assert max(_load(rows, part.tolist()) for part in np.split(np.arange(len(rows)), cuts)) > 256


def test_micro_batches_are_as_even_as_their_number_allows() -> None:
    """Ranks that reduce in step wait for the longest each time: 7, 7 and 6 rows of ten tokens, not 9, 9 and 2."""
    rows = _rows([[row] for row in range(20)], [[0] * 9] * 20)
    assert [len(micro) for micro in plan_micro_batches(rows, 1, 90)[0]] == [7, 7, 6]


@pytest.mark.parametrize(("count", "ranks", "budget"), [(244, 8, 609), (241, 2, 696), (221, 2, 957), (126, 8, 522)])
def test_rows_of_one_length_are_dealt_out_but_for_one(count: int, ranks: int, budget: int) -> None:
    """As even as rows can be cut: no rank has a small rest in the end. Control: filling each one leaves that."""
    rows = _rows([[row] for row in range(count)], [[0] * 86] * count)
    for micro_batches in plan_micro_batches(rows, ranks, budget):
        sizes = [len(micro) for micro in micro_batches]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) * 87 <= budget
    filled = [budget // 87] * (count // ranks // (budget // 87))
    assert filled[0] - (count // ranks - sum(filled)) > 1


def test_groups_that_divide_evenly_are_never_cut() -> None:
    """The benchmark's update: 64 prompts of 256 tokens, 8 responses of 1,024 each, 16 passes of 33,792 tokens."""
    rows = _rows([[row // 8] * 256 for row in range(512)], [[0] * 1024] * 512)
    assert plan_micro_batches(rows, 1, 33_792) == [[list(range(32 * part, 32 * part + 32)) for part in range(16)]]


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_place_is_empty_where_there_are_rows_for_all(ranks: int) -> None:
    """An empty place is a whole pass for nothing. One rank's long rows ask for many places; others split theirs."""
    rows = _rows([[row] for row in range(64)], [[0] * (60 if row < 8 else 15) for row in range(64)])
    plan = plan_micro_batches(rows, ranks, 70)
    assert all(micro for micro_batches in plan for micro in micro_batches)
    assert len(plan[0]) * 70 * ranks < 1.5 * rows.lengths_B.sum()


def test_fewer_rows_than_places_leave_places_empty() -> None:
    """Three rows on two ranks, one row at a time: the fourth place is empty, and still there."""
    plan = plan_micro_batches(_planned(3), 2, 1)
    assert sorted(len(micro) for micro_batches in plan for micro in micro_batches) == [0, 1, 1, 1]


@pytest.mark.parametrize("samples", [1, 8])
def test_ranks_get_nearly_equal_loads(samples: int) -> None:
    """The heaviest rank decides when a step ends. Control: the same number of rows for each is further apart."""
    rows = _planned(256, samples)
    plan = plan_micro_batches(rows, 4, 512)
    loads = [sum(_load(rows, micro) for micro in micro_batches) for micro_batches in plan]
    dealt = [_load(rows, part.tolist()) for part in np.array_split(np.argsort(rows.lengths_B), 4)]
    assert max(loads) / min(loads) < 1.05 < max(dealt) / min(dealt)


def test_samples_of_a_prompt_stay_together_wherever_they_stand_in_the_file() -> None:
    """A prompt is computed once per micro-batch that has it, so few may split one. Control: rows as they come."""
    samples, prompts = 8, 24
    rows = _planned(samples * prompts, samples)
    mixed = np.random.default_rng(0).permutation(len(rows))
    plan = plan_micro_batches(rows, 2, 512, mixed)
    micro_batches = [micro for rank in plan for micro in rank]
    spread = sum(len(set(rows.prompt_ids_B[micro])) for micro in micro_batches)
    assert spread <= prompts + len(micro_batches) - 1
    scattered = np.array_split(mixed, len(micro_batches))
    assert sum(len(set(rows.prompt_ids_B[part])) for part in scattered) > 2 * spread


def test_tokens_that_are_reported_as_computed_are_those_of_the_runs() -> None:
    """Less than the rows' tokens where prompts are shared. Control: a run that counts nothing reports none."""
    rows = _planned(40, 4)
    plan = plan_micro_batches(rows, 2, 200)
    packed = [pack(rows, micro, CPU) for rank in plan for micro in rank]
    assert sum(run.computed for run in packed) == planned(rows, plan)[0] < rows.lengths_B.sum()
    assert {run.branched for run in packed} == {0}
    assert pack(rows, [], CPU).computed == 0 < len(pack(rows, [], CPU).tokens_N)


def test_the_plan_depends_on_the_rows_alone() -> None:
    """Every rank plans by itself: ties must fall the same way everywhere."""
    assert plan_micro_batches(_planned(40, 4), 2, 100) == plan_micro_batches(_planned(40, 4), 2, 100)


def test_prompts_are_told_apart_once_for_all_columns_that_rows_are_given() -> None:
    """A loss that picks tokens adds a column per mini-batch, and all prompts need not be looked at again for that.

    Control: other rows have prompts of their own.
    """
    rows = _planned(8, 4)
    assert replace(rows, columns={}).prompt_ids_B is rows.prompt_ids_B
    assert rows.take(np.array([0, 7])).prompt_ids_B.tolist() == [0, 1]


def test_a_micro_batch_is_packed_when_its_turn_comes() -> None:
    """Packed at once, a whole experience would lie on the device before the first pass."""
    packed: list[list[int]] = []

    def remember(micro: list[int]) -> list[int]:
        packed.append(micro)
        return micro

    for number, micro in enumerate(PackedInTurn([[0, 1], [2], []], remember), start=1):
        assert len(packed) == number
        assert packed[-1] is micro
    assert packed == [[0, 1], [2], []]


# ---- a packed micro-batch ------------------------------------------------------------------------------------------


def test_prompts_and_responses_lie_one_after_the_other_without_padding() -> None:
    """Tokens, positions, row borders and per-token columns against hand values, in the order asked for."""
    batch = pack(ROWS, [2, 0], CPU)
    assert batch.tokens_N.tolist() == [5, 6, 12, 1, 2, 3, 7, 8]
    assert batch.positions_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.layout.cu_queries_S1.tolist() == batch.layout.cu_keys_S1.tolist() == [0, 3, 8]
    assert (batch.layout.sequences, batch.layout.max_queries, batch.layout.max_keys) == (2, 5, 5)
    assert batch.layout.shared is None
    assert batch.last_B.tolist() == [2, 7]
    assert batch.targets_T.tolist() == [12, 7, 8]
    assert batch.offsets_B1.tolist() == [0, 1, 3]
    assert batch.mask_T.tolist() == [1.0, 1.0, 1.0]
    assert batch.columns["mark"].tolist() == [120.0, 70.0, 80.0]
    assert batch.layout.slots_K is not None
    assert batch.layout.slots_K.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


def test_a_prompt_of_several_rows_stands_once_before_its_responses() -> None:
    """Rows 0, 2 and 3 share a prompt; row 2 has no response. All against hand values."""
    rows = _rows([[1, 2], [3], [1, 2], [1, 2]], [[4, 5], [6, 7], [], [8]])
    batch = pack(rows, [0, 1, 2, 3], CPU)
    assert batch.tokens_N.tolist() == [1, 2, 4, 5, 8, 3, 6, 7]
    assert batch.positions_N.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert batch.targets_T.tolist() == [4, 5, 6, 7, 8]
    assert batch.predict_T.tolist() == [1, 2, 5, 6, 1]
    assert batch.last_B.tolist() == [3, 7, 1, 4]
    assert batch.layout.cu_queries_S1.tolist() == [0, 2, 4, 5, 8]  # prompt, two responses, row 1 as a whole
    assert batch.layout.cu_keys_S1.tolist() == [0, 2, 6, 9, 12]
    shared = batch.layout.shared
    assert shared is not None
    assert batch.tokens_N[shared.source_K].tolist() == [1, 2, 1, 2, 4, 5, 1, 2, 8, 3, 6, 7]
    assert shared.own_N.tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    assert (shared.copies_C.tolist(), shared.copied_C.tolist()) == ([2, 3, 6, 7], [0, 1, 0, 1])


def test_each_response_token_is_predicted_from_the_token_before_it() -> None:
    """An index off by one would score every token by its successor's distribution."""
    batch = pack(ROWS, [1, 0, 2], CPU)
    assert batch.tokens_N[batch.predict_T].tolist() == [4, 9, 10, 3, 7, 6]
    assert batch.tokens_N[batch.predict_T + 1].tolist() == batch.targets_T.tolist()


def test_an_empty_micro_batch_runs_and_counts_nothing() -> None:
    """It has tokens, as few as can be, so the pass and its collectives happen, and zeros: 0 times NaN is NaN."""
    odd = replace(ROWS, columns={"mark": Ragged(np.full(6, np.nan, np.float32), ROWS.responses.offsets_B1)})
    batch = pack(odd, [], CPU)
    assert batch.tokens_N.tolist() == [5, 6, 12]
    assert batch.mask_T.tolist() == batch.columns["mark"].tolist() == [0.0]
    counted = pack(odd, [2], CPU)
    assert counted.mask_T.tolist() == [1.0]
    assert counted.columns["mark"].isnan().all()


def test_an_empty_micro_batch_has_a_response_where_a_row_has_one() -> None:
    """A head that no token reaches has no gradient to reduce. Control: where no row has one, it still runs."""
    assert pack(_rows([[1, 2, 3], [4]], [[7, 8], []]), [], CPU).tokens_N.tolist() == [1, 2, 3, 7, 8]
    assert pack(_rows([[1, 2, 3], [4]], [[], []]), [], CPU).tokens_N.tolist() == [1, 2, 3]


def test_the_mask_of_the_file_is_kept() -> None:
    """A token that is not the model's own (a tool's answer) stays uncounted."""
    masked = Rows(ROWS.prompts, ROWS.responses, Ragged.of([[1, 0], [0, 1, 1], [0]], np.uint8), {})
    assert pack(masked, [0, 1, 2], CPU).mask_T.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
