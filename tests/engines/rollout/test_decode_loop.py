"""Every prompt is answered once, by whichever engine, and its tokens need not depend on which."""

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
from penstock.engines.rollout.engine import engine_seed
from penstock.engines.rollout.prompt_queue import (
    EnginePlace,
    FixedShare,
    PromptQueue,
    PulledPrompts,
    place_of,
    prompt_queue,
    pull_order,
    store_counter,
)
from penstock.engines.rollout.responses import sample_seeds
from tests.engines.shared_ranks import Ranks, Shape

LENGTHS = np.array([3, 9, 1, 9, 4])
PROMPTS = Ragged.of([np.arange(4, 5 + number % 11) for number in range(24)], np.int32)
FolderOf = Callable[[Shape], Path]


def _supplies(engines: int, prompts: int, generation: int = 0) -> list[PulledPrompts]:
    store = HashStore()
    places = [EnginePlace(engine, engines, 0, 1) for engine in range(engines)]
    return [
        PulledPrompts(np.arange(prompts), engines, store_counter(store, place, str(generation))) for place in places
    ]


# ---- which prompts -------------------------------------------------------------------------------------------------


def test_the_longest_prompts_go_first() -> None:
    """Among equals the earlier one."""
    assert pull_order(LENGTHS).tolist() == [1, 3, 4, 0, 2]


@pytest.mark.parametrize(("engines", "prompts"), [(2, 1), (2, 7), (3, 64), (8, 100)])
def test_engines_that_pull_in_any_order_take_every_prompt_once(engines: int, prompts: int) -> None:
    """Never more than there is room for, however they take turns."""
    turns = random.Random(prompts)
    queues, taken = _supplies(engines, prompts), []
    while not all(queue.exhausted for queue in queues):
        room = turns.randint(1, 9)
        pulled = turns.choice([queue for queue in queues if not queue.exhausted]).take(room)
        assert len(pulled) <= room
        taken += pulled
    assert sorted(taken) == list(range(prompts))


def test_pulls_are_large_at_first_and_single_at_last() -> None:
    """Two engines that take turns: half of a fair share of what is left, so that none is left with a long rest."""
    queues, sizes = _supplies(2, 64), []
    while not queues[len(sizes) % 2].exhausted:
        sizes.append(len(queues[len(sizes) % 2].take(room=64)))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-5:]) == (16, [1, 1, 1, 1, 0])


def test_each_generation_counts_anew() -> None:
    """The count of the last one is still in the store."""
    store, place = HashStore(), EnginePlace(0, 2, 0, 1)
    first, second = (store_counter(store, place, str(generation)) for generation in (1, 2))
    assert [first(3), second(2), first(1), second(1)] == [0, 0, 3, 2]


def test_all_ranks_of_an_engine_learn_what_its_first_one_pulled() -> None:
    """Two tensor-parallel engines of two ranks: the others of an engine wait, and count nothing themselves."""
    store = HashStore()
    counters = [store_counter(store, EnginePlace(engine, 2, rank, 2), "0") for engine in (0, 1) for rank in (0, 1)]
    pulled: list[list[int]] = [[], [], [], []]
    ranks = [Thread(target=lambda n=n: pulled[n].extend(counters[n](1) for _ in range(20))) for n in range(4)]
    for rank in reversed(ranks):
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert pulled[0] == pulled[1]
    assert pulled[2] == pulled[3]
    assert sorted(pulled[0] + pulled[2]) == list(range(40))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prompts_go_to_the_engine_that_has_their_episodes(seed: int) -> None:
    """Before all others, never more than there is room for, and each prompt is taken once. What an engine has that is
    not there any more is anyone's. Control: without homes an engine takes what others have.
    """
    turns, store, homes_P = random.Random(seed), HashStore(), np.array([2, 0, 3, -1, 0, 1, 0], np.int32)
    lengths = np.ones(20)

    def queues(generation: int, homes_P: np.ndarray | None) -> list[PromptQueue]:
        places = [EnginePlace(engine, 3, 0, 1) for engine in range(3)]
        return [prompt_queue(lengths, place, store, generation, False, 7, homes_P=homes_P) for place in places]

    def taken_by(engines: list[PromptQueue]) -> dict[int, list[int]]:
        taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while left := [engine for engine, queue in enumerate(engines) if not queue.exhausted]:
            engine, room = turns.choice(left), turns.randint(1, 2)
            pulled = engines[engine].take(room)
            assert len(pulled) <= room
            taken[engine] += pulled
        return taken

    taken = taken_by(queues(seed, homes_P))
    assert taken[0][:3] == [1, 4, 6] and taken[1][:1] == [5] and taken[2][:1] == [0]
    assert sorted(position for engine in taken.values() for position in engine) == list(range(20))
    first = queues(seed + 10, None)[1].take(2)
    assert first == [0, 1], "the first that is there takes them"


def test_an_engine_alone_takes_all_at_once_and_fixed_shares_need_no_store() -> None:
    """Shares differ by one prompt at most; an engine without any has nothing to wait for."""
    alone = prompt_queue(LENGTHS, EnginePlace(0, 1, 0, 1), None, 0, fixed=False)
    assert alone.take(1) == [0, 1, 2, 3, 4]
    assert alone.exhausted
    shares = [prompt_queue(LENGTHS, EnginePlace(engine, 2, 0, 1), None, 0, fixed=True).take(1) for engine in range(2)]
    assert shares == [[1, 4, 2], [3, 0]]
    assert FixedShare(np.array([], int)).exhausted


def test_neighbouring_ranks_form_an_engine() -> None:
    """Four ranks, two per engine."""
    assert [place_of(rank, 4, 2) for rank in (0, 3)] == [EnginePlace(0, 2, 0, 2), EnginePlace(1, 2, 1, 2)]


# ---- random streams ------------------------------------------------------------------------------------------------


def test_streams_differ_between_samples_prompts_and_generations() -> None:
    """Also in the 32 bits that a CPU generator keeps of a seed; the same numbers give the same streams again."""
    generations = ([0, 1, 0], [0, 1, 1], [0, 2, 0], [1, 1, 0])
    seeds = [seed for numbers in generations for prompt in range(64) for seed in sample_seeds(numbers, prompt, 8)]
    seeds += [engine_seed(numbers, engine) for numbers in generations for engine in range(8)]
    assert len(set(seeds)) == len({seed % (1 << 32) for seed in seeds}) == 4 * (64 * 8 + 8)
    assert all(0 <= seed < 1 << 63 for seed in seeds), "vLLM keeps seeds as signed numbers"
    assert sample_seeds([0, 1, 0], 5, 8)[:3] == sample_seeds([0, 1, 0], 5, 3)


# ---- real engines --------------------------------------------------------------------------------------------------


def _ask(
    ranks: Ranks,
    folder: Path,
    prompts: Ragged = PROMPTS,
    on_news: Callable[[Any], None] | None = None,
    **sampling: Any,
) -> list[Any]:
    defaults = {"samples": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 40, "ignore_eos": False}
    asked = {"prompts": prompts, "sampling": {"seed": [7, 0, 0], **defaults, **sampling}, "tokenizer": str(folder)}
    return ranks.ask_each("generate", [asked] * ranks.count, on_news)


def _by_prompt(replies: list[Any], samples: int) -> dict[int, list[list[int]]]:
    """The responses to each prompt; every prompt was answered by one rank."""
    found: dict[int, list[list[int]]] = {}
    for reply in replies:
        rows = reply.responses
        assert len(rows) == len(reply.texts) == len(reply.request_seconds_B) == samples * len(reply.positions_P)
        for number, position in enumerate(reply.positions_P.tolist()):
            assert position not in found
            found[position] = [rows.row(samples * number + sample).tolist() for sample in range(samples)]
    return found


def test_two_engines_pull_all_prompts_once(one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf) -> None:
    """Responses end anywhere up to the limit, two prompts at a time fit, and both engines work to the end."""
    folder = folder_of(Shape("qwen3", tied=False))
    rollout = {"prompts": 8, "samples": 2, "max_response_tokens": 40, "max_sequences": 4}
    two_ranks.build(folder, ("actor", "rollout"), rollout={**rollout, "reproducible": False})
    one_rank.build(folder, ("actor", "rollout"), rollout=rollout)

    greedy = _by_prompt(_ask(two_ranks, folder, temperature=0.0), 1)
    assert greedy == _by_prompt(_ask(one_rank, folder, temperature=0.0), 1)
    assert len({tuple(rows[0]) for rows in greedy.values()}) > 5

    replies = _ask(two_ranks, folder, samples=2)
    answers = _by_prompt(replies, 2)
    assert sorted(answers) == list(range(len(PROMPTS)))
    assert len({len(row) for rows in answers.values() for row in rows}) > 5, "responses of uneven length"
    assert min(len(reply.positions_P) for reply in replies) > 2, "more than an engine could hold at first"
    for reply in replies:
        assert (reply.request_seconds_B > 0).all()
        assert reply.request_seconds_B.max() <= reply.engine_seconds
        assert reply.prompt_tokens == 2 * PROMPTS.lengths_B[reply.positions_P].sum()

    idle, busy = sorted(_ask(two_ranks, folder, PROMPTS.take(np.array([5]))), key=lambda reply: len(reply.texts))
    assert (len(idle.texts), len(busy.texts)) == (0, 1), "one prompt for two engines"


def test_responses_that_end_early_are_told_at_once(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """What is told is what the replies hold, each response once at most, and some of every engine's are told."""
    folder = folder_of(Shape("qwen3", tied=False))
    two_ranks.build(folder, ("actor", "rollout"), rollout={"prompts": 24, "samples": 2, "max_response_tokens": 200})
    heard: list[PartialResults] = []
    replies = _ask(two_ranks, folder, samples=2, max_tokens=200, on_news=heard.append)
    told = [
        ((position, sample), text)
        for news in heard
        for position, sample, text in zip(
            news.ended.positions.tolist(), news.ended.samples.tolist(), news.texts.to_pylist(), strict=True
        )
    ]
    texts = {
        (position, sample): reply.texts[2 * number + sample].as_py()
        for reply in replies
        for number, position in enumerate(reply.positions_P.tolist())
        for sample in range(2)
    }
    assert dict(told).items() <= texts.items()
    assert len(dict(told)) == len(told)
    for reply in replies:
        assert {at for (at, _), _ in told} & set(reply.positions_P.tolist())
        assert {at for (at, _), _ in told} != set(reply.positions_P.tolist()), "the last to end come with the reply"


def test_own_streams_give_the_same_tokens_on_one_rank_and_on_two(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf
) -> None:
    """On the CPU a sample's tokens depend on the seed and its prompt's position. Control: on nothing less."""
    folder = folder_of(Shape("qwen3", tied=False))
    for ranks in (one_rank, two_ranks):
        ranks.build(folder, ("actor", "rollout"))
    alone = _by_prompt(_ask(one_rank, folder, samples=3), 3)
    shared = _ask(two_ranks, folder, samples=3)
    assert [len(reply.positions_P) for reply in shared] == [12, 12]
    assert _by_prompt(shared, 3) == alone
    assert _by_prompt(_ask(two_ranks, folder, samples=3, seed=[8, 0, 0]), 3) != alone
    twice = Ragged.of([PROMPTS.row(4)] * 2, np.int32)
    same_prompt = _by_prompt(_ask(two_ranks, folder, twice, samples=3), 3)
    assert len({tuple(row) for rows in same_prompt.values() for row in rows}) == 6


def test_the_samples_of_a_prompt_share_its_prefix(one_rank: Ranks, folder_of: FolderOf) -> None:
    """Whole blocks of the prompt are computed for the first sample alone. Control: one sample finds nothing.

    The prompts together are more than vLLM takes in one step, which must not cut one of them (on the CPU it cannot).
    """
    folder = folder_of(Shape("qwen3", tied=False))
    one_rank.build(folder, ("actor", "rollout"), data={"max_prompt_tokens": 300})
    prompts = Ragged.of([np.random.default_rng(number).integers(3, 60, 290) for number in range(16)], np.int32)
    (alone,) = _ask(one_rank, folder, prompts, max_tokens=2)
    (grouped,) = _ask(one_rank, folder, prompts, max_tokens=2, samples=4)
    assert alone.cached_tokens == 0
    assert grouped.prompt_tokens == 4 * 16 * 290
    assert grouped.cached_tokens >= 3 * 16 * 256
