"""Episodes of several paths on real engines: every turn that is drawn is learnt from, once, behind what it followed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows, read_rows
from penstock.session.rollout.episodes import episode_columns, episode_figures
from penstock.state.experience import write_columns
from tests.engines.rollout.test_agents import SHAPE, TURNS, FolderOf, Seen, generated
from tests.engines.rows import gathered
from tests.engines.shared_ranks import Ranks
from tests.engines.unpacked import load_unpacked, row_logprobs

LIMIT, MOST = 60, 3
KINDS = ["branched", "branched_tokens", "beside", "at_once", "choices", "many", "text", "talkative"]
Turns = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def seen(one_rank: Ranks, folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return generated(one_rank, folder_of(SHAPE), tmp_path_factory.mktemp("prompts"), KINDS, LIMIT, max_paths=MOST)


@pytest.fixture(scope="module")
def rows(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What the trainer reads of the experience that these episodes become."""
    return read_rows(written(seen, tmp_path_factory.mktemp("experience") / "experience.parquet"))


def written(seen: Seen, path: Path) -> str:
    played, responses = seen.reply.episodes, seen.reply.responses
    assert played is not None and played.asked is not None
    columns = {
        "prompt_tokens": played.asked.prompts,
        "response_tokens": responses,
        "loss_mask": Ragged(played.loss_mask_T, responses.offsets_B1),
        **episode_columns([played], np.arange(len(responses))),
    }
    write_columns(path, columns)
    return str(path)


def learnt(rows: Rows, row: int) -> list[Turns]:
    """The turns of each path of a sample, and what each follows."""
    assert rows.paths is not None
    sequences = rows.sequences
    return [[*_turns(sequences, path)] for path in rows.paths.of_rows(np.array([row])).tolist()]


def _turns(sequences: Rows, path: int) -> Iterator[tuple[list[int], list[int]]]:
    mask, tokens = sequences.mask.row(path), sequences.responses.row(path).tolist()
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for first, end in pairwise(cuts):
        if mask[first]:
            yield [*sequences.prompts.row(path).tolist(), *tokens[:first]], tokens[first:end]


def drawn(seen: Seen, name: str) -> Turns:
    turns = (f"{name}{turn}" for turn in range(1, TURNS + 1))
    return [(seen.asked[turn], seen.drawn[turn]) for turn in turns if turn in seen.drawn]


def test_every_turn_is_learnt_from_once_behind_what_vllm_saw(seen: Seen, rows: Rows) -> None:
    """Of branches, choices, what is asked at once or from scratch. Controls: `many` begins a path more than there may
    be, whose turn is drawn and not learnt from; and of episodes of several turns there are those of one path.
    """
    played = seen.reply.episodes
    assert played is not None and played.asked is not None
    for row, name in seen.rows(*KINDS):
        paths = learnt(rows, row)
        turns = [turn for path in paths for turn in path]
        unlearnt = [turn for turn in drawn(seen, name) if turn not in turns]
        assert sorted([*turns, *unlearnt]) == sorted(drawn(seen, name))
        assert len(unlearnt) == played.asked.unbridged_B[row] and len(paths) <= MOST
        assert played.turns_B[row] == len(turns) + len(unlearnt)
    assert [played.asked.unbridged_B[row] for row, _ in seen.rows("many")] == [1, 1]
    assert not any(played.asked.unbridged_B[row] for row, _ in seen.rows("branched", "choices", "beside", "text"))
    assert {len(learnt(rows, row)) for row, _ in seen.rows("text")} == {1}


def test_a_path_goes_on_where_it_was_and_another_begins_within_it(seen: Seen, rows: Rows) -> None:
    """Texts and tokens alike: two turns, another after the first of them, and a third that goes on with the first path.

    The branch's prompt is the tokens that led there, as they were drawn. Control: the same text tokenised again has
    other tokens in some of them.
    """
    tokenizer, again = AutoTokenizer.from_pretrained(seen.folder), []
    for row, name in seen.rows("branched", "branched_tokens"):
        main, branch = learnt(rows, row)
        turns = drawn(seen, name)
        assert [len(main), len(branch)] == [3, 1] and [turns[0], turns[1], turns[3]] == main and turns[2] == branch[0]
        prompt, (first, said) = branch[0][0], main[0]
        assert prompt[: len(first) + len(said)] == [*first, *said] and len(prompt) > len(first) + len(said)
        text = tokenizer.decode(said, skip_special_tokens=True)
        again.append(tokenizer(text, add_special_tokens=False)["input_ids"] != said)
    assert any(again)


def test_log_probs_are_the_trainers_of_that_very_sequence(
    seen: Seen, rows: Rows, one_rank: Ranks, tmp_path: Path
) -> None:
    """Those that vLLM drew with, the trainer's packed ones, and plain ones of every path by itself are the same.

    Control: as one conversation, path behind path, the tokens have others.
    """
    path = written(seen, tmp_path / "experience.parquet")
    theirs_T, counted_T = seen.reply.logprobs_T, rows.mask.values_T > 0
    arguments = {"path": path, "role": "actor", "temperature": 0.8, "budget": 100}
    ours_T = gathered(rows, one_rank.ask("logprobs", **arguments))
    assert theirs_T is not None
    np.testing.assert_allclose(ours_T[counted_T], theirs_T[counted_T], atol=2e-4)
    oracle = load_unpacked(seen.folder)
    with torch.no_grad():
        every = [row_logprobs(oracle, rows.sequences, number, 0.8)[0] for number in range(len(rows.sequences))]
        several = next(row for row, _ in seen.rows("many"))
        chained = row_logprobs(oracle, rows, several, 0.8)[0].numpy()
    np.testing.assert_allclose(ours_T, torch.cat(every).numpy(), atol=2e-4)
    of_row = slice(*rows.responses.offsets_B1[several : several + 2])
    assert np.abs(chained - ours_T[of_row]).max() > 1e-2


def test_all_paths_together_stay_within_the_room_of_one(seen: Seen, rows: Rows) -> None:
    """What they have in common counts once; turns at once share what is left. Control: `talkative`, of three at once,
    has prompts that count, and is cut by them.
    """
    assert rows.paths is not None
    for row, _ in seen.rows(*KINDS):
        first = [*rows.prompts.row(row).tolist()]
        known, new = [first], 0
        for path in rows.paths.of_rows(np.array([row])).tolist():
            whole = [*rows.sequences.prompts.row(path).tolist(), *rows.sequences.responses.row(path).tolist()]
            new += len(whole) - max(_common(whole, other) for other in known)
            known.append(whole)
        assert new <= LIMIT
    lengths = [rows.responses.lengths_B[row] for row, _ in seen.rows("talkative")]
    assert all(0 < length < LIMIT - 2 * 9 for length in lengths)


def _common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_what_is_asked_at_once_begins_the_same_paths_in_any_order(
    seen: Seen, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Control: another sample of the same prompt has others."""
    kinds = [kind.replace("at_once", "at_once_in_another_order") for kind in KINDS]
    other = generated(one_rank, folder_of(SHAPE), tmp_path, kinds, LIMIT, max_paths=MOST)
    found = [read_rows(written(one, tmp_path / f"{number}.parquet")) for number, one in enumerate((seen, other))]
    at_once = [row for row, _ in seen.rows("at_once")]
    both = [[learnt(rows, row) for row in at_once] for rows in found]
    assert both[0] == both[1] and both[0][0] != both[0][1]


def test_episodes_that_never_branch_are_those_of_one_path(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Token by token; whole trainings end in the same bits (tests/gateway/test_paths_training.py).

    Control: those that do are not.
    """
    kinds = ["text", "tokens", "short", "choices"]
    several, one = (
        generated(one_rank, folder_of(SHAPE), tmp_path, kinds, LIMIT, max_paths=most).reply.responses
        for most in (MOST, 1)
    )
    same = [several.row(row).tolist() == one.row(row).tolist() for row in range(len(one))]
    assert same == [True] * 6 + [False] * 2


def test_figures_say_how_many_paths_there_are(seen: Seen, rows: Rows) -> None:
    """The mean of samples, and of turns that are still not learnt from all."""
    played, counts = seen.reply.episodes, rows.paths
    assert played is not None and counts is not None
    columns = episode_columns([played], np.arange(len(rows))) | {"loss_mask": rows.mask}
    figures = episode_figures(columns)
    assert figures["rollout/paths"] == pytest.approx(counts.counts_B.mean())
    assert 1.5 < figures["rollout/paths"] < MOST and figures["rollout/unbridged_turns"] >= 2
