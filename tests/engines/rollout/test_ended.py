"""Responses that are there already, of a generation that was cut off, are not generated again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, EngineResponses
from tests.engines.shared_ranks import Ranks, Shape

SHAPE, SAMPLES, VERSION = Shape("qwen3", tied=False), 3, 5
PROMPTS = Ragged.of([np.arange(4, 5 + number % 11) for number in range(24)], np.int32)
NOTHING = CarriedResponses(
    Ragged.of([], np.int32),
    np.empty(0, np.float32),
    np.empty(0, np.int32),
    np.empty(0, bool),
    np.empty(0, bool),
)
FolderOf = Callable[[Shape], Path]
Row = tuple[int, int]  # a prompt's position, a sample


def _ask(ranks: Ranks, folder: Path, longest: int = 40, **asked: Any) -> list[EngineResponses]:
    sampling = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": longest}
    sampling |= {"ignore_eos": False, "seed": [7, 0, asked.pop("purpose", 0)], "logprobs": True}
    asked = {"prompts": PROMPTS, "sampling": sampling, "tokenizer": str(folder), **asked}
    return [reply for reply in ranks.ask_each("generate", [asked] * ranks.count) if reply is not None]


def _rows(replies: list[EngineResponses]) -> dict[Row, tuple[list[int], list[float], int]]:
    """Of each response its tokens, their log-probs, and the version that sampled the last."""
    found: dict[Row, tuple[list[int], list[float], int]] = {}
    for reply in replies:
        assert reply.logprobs_T is not None
        logprobs = Ragged(reply.logprobs_T, reply.responses.offsets_B1)
        for number in range(len(reply.responses)):
            row = (int(reply.positions_P[number // SAMPLES]), number % SAMPLES)
            assert row not in found
            found[row] = (
                reply.responses.row(number).tolist(),
                logprobs.row(number).tolist(),
                int(reply.last_version_B[number]),
            )
    return found


def _ended(rows: dict[Row, tuple[list[int], list[float], int]]) -> EndedResponses:
    tokens = Ragged.of([tokens for tokens, _, _ in rows.values()], np.int32)
    logprobs = Ragged.of([logprobs for _, logprobs, _ in rows.values()], np.float32)
    positions, samples = zip(*rows, strict=True)
    count = len(rows)
    versions_T = np.full(len(tokens.values_T), VERSION, np.int32)
    truncated_B = np.asarray([position % 2 == 0 for position in positions])
    responses = CarriedResponses(tokens, logprobs.values_T, versions_T, np.ones(count, bool), truncated_B)
    return EndedResponses(np.asarray(positions, np.int64), np.asarray(samples, np.int64), responses)


@pytest.mark.parametrize("engines", [1, 2])
def test_only_what_is_missing_is_generated(
    engines: int, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf
) -> None:
    """Of some prompts a response, of one all, of most none. Control: what is missing comes out otherwise this time."""
    ranks, folder = (one_rank, two_ranks)[engines - 1], folder_of(SHAPE)
    rollout = {"prompts": 24, "samples": SAMPLES, "max_response_tokens": 40, "max_sequences": 12}
    ranks.build(folder, ("actor", "rollout"), rollout={**rollout, "reproducible": False}, algorithm={"correction": {}})
    before = _rows(_ask(ranks, folder))
    there = {row: found for row, found in before.items() if row[0] == 3 or sum(row) % 5 == 0}
    replies = _ask(ranks, folder, ended=_ended(there), purpose=1 << 16)
    after = _rows(replies)
    assert after.keys() == before.keys()
    for row, (tokens, logprobs, _) in there.items():
        assert after[row] == (tokens, logprobs, VERSION)
    missing = before.keys() - there.keys()
    assert sum(after[row][0] == before[row][0] for row in missing) < len(missing) / 4
    assert VERSION not in {after[row][2] for row in missing}
    lengths = PROMPTS.lengths_B
    assert sum(reply.prompt_tokens for reply in replies) == sum(int(lengths[position]) for position, _ in missing)
    cut = {
        (int(position), sample)
        for reply in replies
        for number, position in enumerate(reply.positions_P)
        for sample in range(SAMPLES)
        if reply.truncated_B[number * SAMPLES + sample]
    }
    assert cut & there.keys() == {row for row in there if row[0] % 2 == 0}


def test_where_nothing_is_missing_nothing_is_generated(one_rank: Ranks, folder_of: FolderOf) -> None:
    folder = folder_of(SHAPE)
    one_rank.build(folder, ("actor", "rollout"), algorithm={"correction": {}})
    before = _rows(_ask(one_rank, folder))
    (reply,) = _ask(one_rank, folder, ended=_ended(before))
    assert reply.prompt_tokens == 0
    assert {row: found[:2] for row, found in _rows([reply]).items()} == {
        row: found[:2] for row, found in before.items()
    }


def test_they_count_for_a_quota_and_take_the_place_of_what_was_carried(one_rank: Ranks, folder_of: FolderOf) -> None:
    """Three prompts of those that go on and two new ones fill a quota at once: nothing is generated for others."""
    folder = folder_of(SHAPE)
    rollout = {"prompts": 24, "samples": SAMPLES, "max_response_tokens": 200, "max_sequences": 128}
    one_rank.build(folder, ("actor", "rollout"), rollout=rollout, algorithm={"correction": {}})
    (first,) = _ask(one_rank, folder, 200, wanted=5, carried=NOTHING)
    assert first.left is not None and first.left_P is not None
    assert len(first.left_P) == 19
    prompts = PROMPTS.take(np.concatenate([first.left_P, np.setdiff1d(np.arange(24), first.left_P)]))
    done = {
        (position, sample): ([9, 8, 7], [-1.0] * 3, 0) for position in (0, 2, 5, 20, 22) for sample in range(SAMPLES)
    }
    (reply,) = _ask(one_rank, folder, 200, prompts=prompts, wanted=5, carried=first.left, ended=_ended(done))
    assert sorted(reply.positions_P.tolist()) == [0, 2, 5, 20, 22]
    assert reply.responses.values_T.tolist() == [9, 8, 7] * 5 * SAMPLES
    assert reply.versions_T is not None
    assert set(reply.versions_T.tolist()) == {VERSION}
