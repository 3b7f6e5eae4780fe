"""What rows begin with in common is found whatever their order, stands once in a run, and rows are laid beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches import micro_batches, packing, trees
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedBatch, Rows, arrange, pack
from penstock.engines.batches.trees import LEAST, Origins
from tests.engines.rows import branched_rows, planned, random_rows

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
    chosen_B = random.permutation(30)
    arranged = arrange(rows, chosen_B)
    paths, origins = [_path(rows, row) for row in chosen_B[arranged.order_B]], arranged.origins
    for row in range(30):
        best = max((_common(paths[row], paths[other]) for other in range(row)), default=0)
        assert origins.shared_B[row] == best
        donor = int(origins.donor_B[row])
        assert donor < row or best == 0
        assert paths[donor][:best] == paths[row][:best]
    assert rows.lengths_B.sum() - origins.shared_B.sum() == _nodes(rows, list(range(30))) < rows.lengths_B.sum()


def _common(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    return next((at for at in range(length) if a[at] != b[at]), length)


LOOKS: dict[str, Callable[..., Any]] = {
    "_in_responses": lambda *given: np.zeros(len(given[-1]), dtype=bool),
    "_across_prompts": lambda *given: np.zeros(len(given[-1]), dtype=bool),
    "_nested": lambda texts: False,
}


@pytest.mark.parametrize("without", [None, *LOOKS])
def test_no_row_that_shares_enough_is_overlooked(without: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a few tokens of each row says which are compared: against comparing all pairs, in one run and in some.

    Some draws have prompts shorter than these tokens, prompts that begin with another one, one beginning of all
    prompts, or nothing to compare. Controls: without one of the looks tokens are overlooked.
    """
    monkeypatch.setattr(trees, "LEAST", 3)
    if without is not None:
        monkeypatch.setattr(trees, without, LOOKS[without])
    same, compared = [], []
    for seed in range(200):
        random = np.random.default_rng(seed)
        rows = _drawn(random)
        index_B = random.permutation(len(rows))
        arranged = arrange(rows, index_B)
        index_B, families_B = index_B[arranged.order_B], arranged.families_B
        line_B = np.argsort(random.permutation(len(rows))[families_B], kind="stable")  # other prompts first
        parts_B = np.sort(random.integers(0, 4, len(rows)))
        spared = _spared_by_pairs(rows, index_B[line_B], parts_B)
        same.append(_spared_by_pairs(rows, index_B, np.zeros_like(parts_B)) == arranged.origins.shared_B.tolist())
        same.append(sum(spared) == arranged.spared(line_B, parts_B))
        compared.append(len(arranged.alike.row_C))
    assert all(same) == (without is None)
    assert min(compared) == 0 < max(compared)


def _drawn(random: np.random.Generator) -> Rows:
    """Prompts, some of which begin with others, and for each a few responses that branch."""

    def said(most: int) -> list[int]:
        return random.integers(0, 5, random.integers(0, most)).tolist()

    system, prompts, responses = said(6) if random.random() < 0.5 else [], [], []
    for _ in range(random.integers(1, 6)):
        begun = [*prompts[-1], *responses[-1][:2]] if prompts and random.random() < 0.2 else system
        prompt = [*begun, *said(5), 7]
        for _ in range(random.integers(1, 4)):
            begun = responses[-1] if prompts and random.random() < 0.2 else []
            prompts.append(prompt)
            responses.append([*begun, *said(6)])
    return _rows(prompts, responses)


def _spared_by_pairs(rows: Rows, line_B: np.ndarray, parts_B: np.ndarray) -> list[int]:
    """First tokens of each row of a line that one before it in its part has, if they are enough."""
    paths, prompts = [_path(rows, row) for row in line_B], rows.prompt_ids_B[line_B]
    spared = []
    for row, path in enumerate(paths):
        before = [other for other in range(row) if parts_B[other] == parts_B[row]]
        of_prompt = rows.prompts.lengths_B[line_B[row]] if prompts[row] in prompts[before] else 0
        best = max((_common(path, paths[other]) for other in before), default=0)
        spared.append(best if best - of_prompt >= trees.LEAST else of_prompt)
    return spared


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
    assert beside == (4 * (2 + 100 + 2 * 20), 4 * 100)
    assert as_they_come == (4 * (2 + 2 * 120), 0)
    assert plan_micro_batches(rows, 1, 250, together=2) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


def _with_system_prompt(prompts: int, samples: int, tokens: int, seed: int = 0) -> Rows:
    """Prompts of `tokens` after `LEAST` with which all begin; of their responses the second and third begin alike."""
    random = np.random.default_rng(seed)
    system, alike = random.integers(0, 999, LEAST).tolist(), random.integers(0, 999, LEAST).tolist()
    own = [[*system, *random.integers(0, 999, tokens).tolist()] for _ in range(prompts)]
    lengths = random.integers(1, 60, prompts * samples).tolist()
    said = [random.integers(0, 999, length).tolist() for length in lengths]
    responses = [[*alike, *one] if row % samples in (1, 2) else one for row, one in enumerate(said)]
    return _rows([own[row // samples] for row in range(len(responses))], responses)


def _by_prompt(rows: Rows, ranks: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The plan of rows of which nobody saw that they share more."""
    with monkeypatch.context() as patched:
        for look in ("_in_responses", "_across_prompts"):
            patched.setattr(trees, look, LOOKS[look])
        return plan_micro_batches(replace(rows), ranks, budget)


def _opened(rows: Rows, line: Sequence[int]) -> int:
    return 1 + int(np.count_nonzero(np.diff(rows.prompt_ids_B[line])))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_beginning_of_all_prompts_leaves_each_prompt_in_one_piece(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with another one's rows in between is computed again. Control: the tree's line alone does that."""
    rows = _with_system_prompt(16, 8, 150)
    plan, before = plan_micro_batches(rows, ranks, 800), _by_prompt(rows, ranks, 800, monkeypatch)
    assert _opened(rows, [row for rank in plan for micro in rank for row in micro]) == 16
    assert planned(rows, plan)[0] <= planned(rows, before)[0] < rows.lengths_B.sum()
    assert len(plan[0]) <= len(before[0])

    monkeypatch.setattr(micro_batches, "_beside", lambda arranged: arranged.origins.order())
    monkeypatch.setattr(micro_batches, "_gains", lambda *_: True)
    torn = plan_micro_batches(rows, ranks, 800)
    assert _opened(rows, [row for rank in torn for micro in rank for row in micro]) > 16
    assert planned(rows, torn)[0] > planned(rows, before)[0]


def test_a_plan_beside_what_rows_share_computes_no_more_than_one_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it more micro-batches, and it may compute less. Control: taken in any case, it would in some draws."""

    def differences() -> list[tuple[int, int]]:
        """Of tokens and of micro-batches, over draws of rows whose prompts begin alike."""
        found = []
        for seed in range(24):
            rows, ranks = _with_system_prompt(12, 1 + seed % 4, 40 + 10 * seed, seed), 1 + seed % 3
            plan, before = plan_micro_batches(rows, ranks, 600), _by_prompt(rows, ranks, 600, monkeypatch)
            found.append((planned(rows, plan)[0] - planned(rows, before)[0], len(plan[0]) - len(before[0])))
        return found

    chosen = differences()
    assert all(tokens <= 0 and count <= 0 for tokens, count in chosen)
    assert any(tokens < 0 for tokens, _ in chosen)
    monkeypatch.setattr(micro_batches, "_gains", lambda *_: True)
    assert any(tokens > 0 or count > 0 for tokens, count in differences())


def test_what_all_rows_of_a_file_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plans and for counting FLOPs. Control: other rows, if only some of these, are looked at by themselves."""
    looked, alike_of = [], packing.alike_of
    monkeypatch.setattr(packing, "alike_of", lambda *given: looked.append(len(given[-1])) or alike_of(*given))
    rows = branched_rows()
    for budget in (200, 400):
        plan_micro_batches(rows, 2, budget, np.arange(len(rows)))
    assert rows.shared_B.sum() > rows.lengths_B.sum() / 2
    assert looked == [len(rows)]
    plan_micro_batches(rows, 2, 200, np.arange(4))
    assert looked == [len(rows), 4]


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
