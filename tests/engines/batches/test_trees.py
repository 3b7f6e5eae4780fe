"""What rows begin with in common is found whatever their order, stands once in a run, and rows are laid beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches import trees
from penstock.engines.batches.micro_batches import Planned, plan_micro_batches, planned
from penstock.engines.batches.packing import PackedBatch, Rows, arrange, pack
from penstock.engines.batches.trees import LEAST, Origins
from tests.engines.rows import branched_rows, random_rows

CPU = torch.device("cpu")
TREE = branched_rows()
EVERY = list(range(len(TREE)))


def _rows(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    answers = Ragged.of(responses, np.int32)
    return Rows(Ragged.of(prompts, np.int32), answers, Ragged(np.ones_like(answers.values_T), answers.offsets_B1), {})


def _origins(rows: Rows) -> Origins:
    return arrange(rows, np.arange(len(rows))).origins


def _path(rows: Rows, row: int) -> list[int]:
    return [*rows.prompts.row(row).tolist(), *rows.responses.row(row).tolist()]


def _nodes(rows: Rows, index: list[int]) -> int:
    """Tokens of the tree, counted one by one."""
    return len({tuple(path[:end]) for path in (_path(rows, row) for row in index) for end in range(1, len(path) + 1)})


def _keys_read(batch: PackedBatch) -> list[tuple[list[int], int]]:
    """For each sequence of attention: the tokens that are its keys, and how many of them are its queries."""
    layout = batch.layout
    assert layout.shared is not None
    keys = batch.tokens_N[layout.shared.source_K].split(layout.cu_keys_S1.diff().tolist())
    return list(zip([key.tolist() for key in keys], layout.cu_queries_S1.diff().tolist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_row_takes_as_much_as_any_row_before_it_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against comparing all pairs, and against the tree's nodes. Few different tokens: chance makes the branches."""
    monkeypatch.setattr(trees, "LEAST", 1)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 2, 3).tolist() for _ in range(30)]
    rows = _rows(prompts, [random.integers(0, 3, random.integers(0, 9)).tolist() for _ in range(30)])
    arranged = arrange(rows, random.permutation(30))
    whole, shared_B = arranged.whole, arranged.origins.shared_B
    for row in range(30):
        best = max((_common(whole.row(row), whole.row(other)) for other in range(row)), default=0)
        assert shared_B[row] == best
        donor = int(arranged.origins.donor_B[row])
        assert donor < row or best == 0
        assert whole.row(donor)[:best].tolist() == whole.row(row)[:best].tolist()
    assert arranged.tokens == _nodes(rows, list(range(30))) < whole.offsets_B1[-1]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    return next((at for at in range(length) if a[at] != b[at]), length)


def test_a_token_of_the_tree_stands_once_and_every_path_is_read_whole() -> None:
    """Each row is read whole, in order, a sequence's own tokens last; positions are those of the row.

    Backwards row 6 opens its prompt's rows, and has too little in common with what lies before to take it from there.
    """
    for index, again in ((EVERY, 0), (EVERY[::-1], len(TREE.prompts.row(6)))):
        batch = pack(TREE, index, CPU)
        assert len(batch.tokens_N) == _nodes(TREE, EVERY) + again < TREE.lengths_B.sum() / 2
        sequences = _keys_read(batch)
        assert sum(queries for _, queries in sequences) == len(batch.tokens_N)
        read = [keys for keys, _ in sequences]
        for row in EVERY:
            path = _path(TREE, row)
            assert any(keys[: len(path)] == path for keys in read)
        positions = [position for keys, queries in sequences for position in range(len(keys) - queries, len(keys))]
        assert batch.positions_N.tolist() == positions
        assert batch.layout.max_keys == TREE.lengths_B.max()
        assert batch.tokens_N[batch.last_B].tolist() == [_path(TREE, row)[-1] for row in index]


def test_a_response_token_that_rows_share_is_looked_at_once() -> None:
    """Each reads its own token's figure. Controls: samples that share a prompt alone, and a prompt that is a response's
    part, which no loss reads twice.
    """
    batch = pack(TREE, EVERY, CPU)
    assert batch.shared is not None
    first_U, of_T = batch.shared.first_U, batch.shared.of_T
    assert len(first_U) < len(of_T) == len(batch.targets_T)
    for column_T in (batch.targets_T, batch.predict_T):
        assert torch.equal(batch.each(batch.distinct(column_T)), column_T)
        assert len(batch.distinct(column_T)) == len(first_U)
    assert pack(random_rows(6, samples=3), list(range(6)), CPU).shared is None
    assert pack(TREE, [0, 7], CPU).shared is None
    assert len(pack(TREE, [0, 7], CPU).tokens_N) == _nodes(TREE, [0, 7])


def test_rows_that_share_little_more_than_a_prompt_are_laid_as_ever() -> None:
    """One token less than the bound changes nothing; the control at the bound begins where the rows part."""
    prompt, said = [1, 2], list(range(3, 3 + LEAST))
    below = _rows([prompt] * 2, [[*said[:-1], 7], [*said[:-1], 8]])
    at = _rows([prompt] * 2, [[*said, 7], [*said, 8]])
    for rows, shared, beyond in ((below, 2, 0), (at, 2 + LEAST, LEAST)):
        origins = _origins(rows)
        assert origins.shared_B.tolist() == [0, shared]
        assert origins.beyond_prompts == beyond
    apart = replace(below, responses=Ragged.of([[5] * LEAST, [6] * LEAST], np.int32))
    assert _places(pack(below, [0, 1], CPU)) == _places(pack(apart, [0, 1], CPU))
    assert _places(pack(at, [0, 1], CPU)) != _places(pack(apart, [0, 1], CPU))


def _places(batch: PackedBatch) -> list[list[int]]:
    layout = batch.layout
    assert layout.shared is not None
    return [batch.predict_T.tolist(), layout.cu_keys_S1.tolist(), layout.shared.source_K.tolist()]


def test_different_prompts_share_what_they_begin_with() -> None:
    """Instructions before every question; a prompt that lies within another row is taken from it as a whole."""
    system = list(range(3, 3 + LEAST))
    rows = _rows([[*system, 1], [*system, 2], [*system, 1, 5]], [[5, 6], [6], [7]])
    assert _origins(rows).shared_B.tolist() == [0, LEAST, LEAST + 2]
    assert len(pack(rows, [0, 1, 2], CPU).tokens_N) == _nodes(rows, [0, 1, 2])


def test_rows_stand_beside_those_that_they_share_most_with() -> None:
    """So micro-batches of two compute fewer tokens than in the order of the file. Control: pairs stay as they are."""
    random = np.random.default_rng(0)
    trunks = [random.integers(3, 60, 100).tolist() for _ in range(4)]
    rows = _rows([[1, 2]] * 8, [[*trunks[row % 4], *random.integers(3, 60, 20).tolist()] for row in range(8)])
    (plan,) = plan_micro_batches(rows, 1, 250)
    assert plan == [[0, 4], [1, 5], [2, 6], [3, 7]]
    beside, as_they_come = planned(rows, [plan]), planned(rows, [[[0, 1], [2, 3], [4, 5], [6, 7]]])
    assert beside == Planned(4 * (2 + 100 + 2 * 20), 4 * 100)
    assert as_they_come == Planned(4 * (2 + 2 * 120), 0)
    assert plan_micro_batches(rows, 1, 250, together=2) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


@pytest.mark.parametrize("budget", [1, 200, 400, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_plan_of_a_tree_holds_every_row_once_within_the_budget(ranks: int, budget: int) -> None:
    """What trees spare is not counted: keys and log-probs take no less memory than without."""
    plan = plan_micro_batches(TREE, ranks, budget)
    micro_batches = [micro for rank in plan for micro in rank if micro]
    assert sorted(row for micro in micro_batches for row in micro) == EVERY
    for micro in micro_batches:
        prompts = {tuple(TREE.prompts.row(row).tolist()) for row in micro}
        as_ever = sum(map(len, prompts)) + int(TREE.responses.lengths_B[micro].sum())
        assert len(pack(TREE, micro, CPU).tokens_N) <= as_ever
        assert as_ever <= budget or len(micro) == 1
