"""A generation with a quota ends with the first prompts that are answered, as many as that, and leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import PartialResults
from penstock.engines.rollout.prompt_queue import EnginePlace, prompt_queue
from penstock.engines.rollout.quota import LOOK_EVERY, AllPrompts, OwnQuota, SharedQuota, quota_of
from tests.engines.shared_ranks import Ranks, Shape

PROMPTS = Ragged.of([np.arange(4, 5 + number % 11) for number in range(24)], np.int32)
LONGEST, SAMPLES, WANTED = 200, 2, 10
SHAPE = Shape("qwen3", tied=False)
FolderOf = Callable[[Shape], Path]


# ---- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, 2, 3, 8])
def test_each_engine_s_part_of_a_quota_is_among_its_own_prompts(engines: int) -> None:
    """Whatever the numbers: the parts make the quota, and no engine waits for prompts that others have."""
    for begun in range(1, 40):
        for wanted in range(1, begun + 1):
            parts = []
            for engine in range(engines):
                place = EnginePlace(engine, engines, 0, 1)
                quota, own = (
                    quota_of(wanted, place, None, 0, fixed=True),
                    prompt_queue(np.ones(begun), place, None, 0, True),
                )
                parts.append(len(quota.count(own.take(1))))
                assert quota.reached
            assert sum(parts) == wanted


def test_without_a_quota_all_count_and_nothing_is_enough() -> None:
    """The generation ends when its prompts are answered."""
    quota = quota_of(None, EnginePlace(0, 1, 0, 1), None, 0, fixed=False)
    assert isinstance(quota, AllPrompts)
    assert (quota.count([0, 1, 5]), quota.reached) == ([0, 1, 5], False)
    alone = quota_of(2, EnginePlace(0, 1, 0, 1), None, 0, fixed=False)
    assert isinstance(alone, OwnQuota)
    assert (alone.count([4]), alone.reached, alone.count([0, 1, 5]), alone.reached) == ([4], False, [0], True)


@pytest.mark.parametrize("wanted", [1, 5, 17])
def test_engines_fill_a_quota_together_however_they_take_turns(wanted: int) -> None:
    """As many count as are wanted, though several are answered in one step; each engine soon knows that it is full."""
    turns, store = random.Random(wanted), HashStore()
    quotas = [quota_of(wanted, EnginePlace(engine, 3, 0, 1), store, 7, fixed=False) for engine in range(3)]
    assert all(isinstance(quota, SharedQuota) for quota in quotas)
    counted = 0
    while not any(quota.reached for quota in quotas):
        counted += len(turns.choice(quotas).count(range(turns.choice([0, 0, 1, 3]))))
    assert counted == wanted
    for quota in quotas:
        steps = 0
        while not quota.reached:
            assert quota.count([]) == []
            steps += 1
        assert steps <= LOOK_EVERY
    assert quotas[0].count([3, 4]) == [], "an answer that came too late"
    again = quota_of(wanted, EnginePlace(0, 3, 0, 1), store, 8, fixed=False)
    assert again.count([7]) == [7], "the next generation counts anew"


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("fixed", [True, False])
def test_what_is_required_counts_and_others_fill_the_rest(engines: int, fixed: bool) -> None:
    """Whichever are answered first. An engine's own part holds those that it begins. Control: none is required."""
    begun, wanted, chance, store = 20, 9, random.Random(engines), HashStore()
    for number, required in enumerate((0, 4, 9)):
        places = [EnginePlace(engine, engines, 0, 1) for engine in range(engines)]
        lengths = np.ones(begun)
        shares = [prompt_queue(lengths, place, None, 0, True, carried=required).take(1) for place in places]
        quotas = [quota_of(wanted, place, store, number, fixed, required) for place in places]
        turns = sorted(
            ((position < required, chance.random()), engine, position)
            for engine, share in enumerate(shares)
            for position in share
        )  # those that are required are the slowest
        counted = []
        for _, engine, position in turns:
            if not quotas[engine].reached:
                counted += quotas[engine].count([position])
        assert len(counted) == wanted and set(range(required)) <= set(counted)
        for quota in quotas:
            assert any(quota.reached or quota.count([]) for _ in range(LOOK_EVERY + 1))


def test_all_ranks_of_an_engine_end_in_the_same_step() -> None:
    """Two tensor-parallel engines of two ranks, which see the same prompts end in the same steps of theirs."""
    store, ended = HashStore(), [0] * 4

    def rank(number: int) -> None:
        place = EnginePlace(number // 2, 2, number % 2, 2)
        quota, answers = quota_of(9, place, store, 0, fixed=False), random.Random(place.engine)
        while not quota.reached:
            quota.count(range(answers.choice([0, 0, 1])))
            ended[number] += 1

    ranks = [Thread(target=rank, args=(number,)) for number in (3, 2, 1, 0)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(30)
    assert ended[0] == ended[1] > 0
    assert ended[2] == ended[3] > 0


# ---- real engines ----------------------------------------------------------------------------------------------------


def _ask(
    ranks: Ranks,
    folder: Path,
    wanted: int | None,
    on_news: Callable[[Any], None] | None = None,
    together: int | None = None,
    ignore_eos: bool = False,
    tell_all: bool = False,
) -> list[Any]:
    sampling = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": LONGEST}
    asked = {
        "prompts": PROMPTS,
        "sampling": {**sampling, "ignore_eos": ignore_eos, "seed": [7, 0, 0]},
        "tokenizer": str(folder),
        "wanted": wanted,
        "together": together,
        "tell_all": tell_all,
    }
    return ranks.ask_each("generate", [asked] * ranks.count, on_news)


def _responses(reply: Any) -> dict[int, list[list[int]]]:
    rows = reply.responses
    assert len(rows) == len(reply.texts) == SAMPLES * len(reply.positions_P)
    return {
        position: [rows.row(SAMPLES * number + sample).tolist() for sample in range(SAMPLES)]
        for number, position in enumerate(reply.positions_P.tolist())
    }


def _build(ranks: Ranks, folder: Path, **rollout: Any) -> None:
    sizes = {"prompts": len(PROMPTS), "samples": SAMPLES, "max_response_tokens": LONGEST, "max_sequences": 64}
    ranks.build(folder, ("actor", "rollout"), rollout=sizes | rollout)


def test_the_batch_is_what_ends_first_and_the_rest_leaves_no_trace(one_rank: Ranks, folder_of: FolderOf) -> None:
    """On the CPU the responses of a batch are those that they would have been, and the next generation is as ever.

    A prompt is answered with its longest response. Control: there are prompts whose longest comes later.
    """
    folder = folder_of(SHAPE)
    _build(one_rank, folder)
    (whole,) = _ask(one_rank, folder, None)
    heard: list[Any] = []
    (reply,) = _ask(one_rank, folder, WANTED, heard.append)
    (again,) = _ask(one_rank, folder, None)
    everything, first = _responses(whole), _responses(reply)
    longest = {position: max(map(len, rows)) for position, rows in everything.items()}
    last = max(longest[position] for position in first)
    assert len(first) == WANTED
    assert {position for position, length in longest.items() if length < last} <= set(first)
    assert sum(length > last for length in longest.values()) > 3
    assert first == {position: everything[position] for position in first}
    assert _responses(again) == everything

    left = [rows for position, rows in everything.items() if position not in first]
    sampled = sum(min(len(row), last) for rows in left for row in rows)
    assert reply.unused_tokens == sampled
    assert whole.unused_tokens == again.unused_tokens == 0
    told = [entry for news in heard for entry in zip(news.ended.positions, news.ended.samples, strict=True)]
    assert len(set(told)) == len(told) and {position for position, _ in told} - set(first), "also of what waits"
    counted, known = list[int](), set[tuple[int, int]]()
    for news in heard:
        known |= set(zip(news.ended.positions.tolist(), news.ended.samples.tolist(), strict=True))
        counted += news.counted
        assert {(position, sample) for position in news.counted for sample in range(SAMPLES)} <= known
    assert counted and len(set(counted)) == len(counted)
    assert set(counted) <= set(first), "rewards are not computed for what waits"


@pytest.mark.parametrize("sizes", [{}, {"reproducible": False}])
def test_engines_tell_of_all_responses_where_that_is_asked_for(
    two_ranks: Ranks, folder_of: FolderOf, sizes: dict[str, Any]
) -> None:
    """Each once, with its tokens, by the engine that generated it. Control: else the last come with the reply alone."""
    folder = folder_of(SHAPE)
    _build(two_ranks, folder, **sizes)
    for everything in (True, False):
        heard: list[Any] = []
        replies = _ask(two_ranks, folder, None, heard.append, tell_all=everything)
        news = [one for one in heard if isinstance(one, PartialResults)]
        told = [
            (one.engine, position, sample, one.ended.responses.tokens.row(row).tolist())
            for one in news
            for row, (position, sample) in enumerate(zip(one.ended.positions, one.ended.samples, strict=True))
        ]
        answered = [
            (engine, position, sample, tokens)
            for engine, reply in enumerate(replies)
            for position, rows in _responses(reply).items()
            for sample, tokens in enumerate(rows)
        ]
        assert len(told) == len({entry[1:3] for entry in told}) and all(entry in answered for entry in told)
        assert (len(told) == len(answered)) == everything


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}])
def test_equal_lengths_are_sampled_in_vain_by_nobody(
    two_ranks: Ranks, folder_of: FolderOf, sizes: dict[str, Any]
) -> None:
    """As many prompts are under way as make the batch: where all end together no other has begun.

    Controls: begun at once the others cost as many tokens; where lengths differ others begin and come first.
    """
    folder = folder_of(SHAPE)
    _build(two_ranks, folder, **sizes)
    wanted = len(PROMPTS) // 2
    for together in (wanted, None):
        replies = _ask(two_ranks, folder, wanted, together=together, ignore_eos=True)
        lost = sum(reply.unused_tokens for reply in replies if reply is not None)
        assert lost == (0 if together else (len(PROMPTS) - wanted) * SAMPLES * LONGEST)
    uneven = [reply for reply in _ask(two_ranks, folder, wanted, together=wanted) if reply is not None]
    assert any(position >= wanted for reply in uneven for position in reply.positions_P.tolist())


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"reproducible": False}])
def test_ranks_end_together(two_ranks: Ranks, folder_of: FolderOf, sizes: dict[str, Any]) -> None:
    """Two engines with parts of their own, one engine of two ranks, two engines that fill the quota together."""
    folder = folder_of(SHAPE)
    _build(two_ranks, folder, **sizes)
    for _ in range(2):
        replies = [reply for reply in _ask(two_ranks, folder, WANTED) if reply is not None]
        positions = [position for reply in replies for position in _responses(reply)]
        assert len(set(positions)) == len(positions) == WANTED
        assert sum(reply.unused_tokens for reply in replies) > 0
