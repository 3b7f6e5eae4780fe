"""Portions are whole groups in the order in which they are complete; where tokens are exact, so are they."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import PartialResults
from penstock.session.requests import Replies
from penstock.session.rollout.portions import Portions
from tests.echo import NOTHING, ended_responses

SAMPLES = 2
DONE = Replies([NOTHING], 0.0, 1.0)


def news(engine: int, entries: Sequence[tuple[int, int]], version: int = 3) -> PartialResults:
    """Responses that have ended: a prompt's number so often as its sample's number says, and once more."""
    tokens = Ragged.of([[position] * (sample + 1) for position, sample in entries], np.int32)
    positions, samples = zip(*entries, strict=True)
    texts = pa.array([f"{position}/{sample}" for position, sample in entries], pa.large_string())
    return PartialResults(engine, ended_responses(positions, samples, tokens, version), texts)


def told(portions: Portions, engine: int, order: Iterable[int]) -> None:
    """Let an engine tell that prompts are complete, in this order."""
    for position in order:
        portions.hear(news(engine, [(position, sample) for sample in range(SAMPLES)]))


def waiting() -> Future[Replies]:
    """Replies that have not come."""
    return Future()


def test_groups_come_in_the_order_in_which_their_last_responses_end() -> None:
    """Of seven prompts three portions of whole groups, as even as can be, each once. Within one the order is theirs."""
    portions = Portions(7, SAMPLES, 3, engines=1, policy_version=3)
    portions.hear(news(0, [(5, 0), (2, 0), (0, 0), (2, 1), (0, 1), (6, 1)]))
    assert portions.wait(0, waiting()) == [0, 2]
    portions.hear(news(0, [(6, 0), (5, 1), (1, 1), (1, 0), (3, 0), (4, 0), (4, 1), (3, 1)]))
    assert portions.wait(1, waiting()) == [5, 6]
    assert portions.wait(2, waiting()) == [1, 3, 4]


def test_the_last_portions_are_small() -> None:
    """Each is half of the one before, down to a single group, and every group is in one.

    Controls: where there are few portions, or as many as groups, all are even.
    """
    for groups, count, last in (
        (512, 64, [8, 9, 4, 2, 1, 1]),
        (64, 8, [10, 11, 1, 1]),
        (8, 4, [2, 2, 2, 2]),
        (8, 8, [1, 1, 1, 1]),
    ):
        portions = Portions(groups, SAMPLES, count, engines=1, policy_version=3)
        told(portions, 0, range(groups))
        found = [portions.wait(number, waiting()) for number in range(count)]
        assert [len(some) for some in found][-len(last) :] == last
        assert [position for some in found for position in some] == list(range(groups))


def test_where_a_batch_takes_some_prompts_engines_tell_which() -> None:
    """Of two engines the first gives three prompts of four and the second two. One that is complete and does not count
    is in no portion. Control: where all make the batch it would be."""
    portions = Portions(8, SAMPLES, 2, engines=2, policy_version=3, wanted=5)
    entries = [(position, sample) for position in (4, 2, 0) for sample in range(SAMPLES)]
    portions.hear(replace(news(0, entries), counted=[4, 0]))
    portions.hear(replace(news(1, [(3, 0), (3, 1), (1, 0)]), counted=[3]))
    assert portions.wait(0, waiting()) == [3, 4]
    portions.hear(replace(news(0, [(6, 0), (6, 1)]), counted=[6]))
    portions.hear(replace(news(1, [(1, 1)]), counted=[1]))
    assert portions.wait(1, waiting()) == [0, 1, 6]
    every = Portions(5, SAMPLES, 2, engines=1, policy_version=3)
    every.hear(news(0, entries))
    assert every.wait(0, waiting()) == [2, 4]


def test_responses_are_those_of_the_portion() -> None:
    """However many pieces of news they came in: in the order of prompts and samples, with all that belongs to them."""
    portions = Portions(3, SAMPLES, 1, engines=1, policy_version=3)
    portions.hear(news(0, [(2, 1), (0, 0)]))
    portions.hear(news(0, [(0, 1), (1, 0), (1, 1), (2, 0)]))
    found = portions.responses([0, 2])
    assert found.answered_P.tolist() == [0, 2] and found.policy_version == 3
    assert found.texts.to_pylist() == ["0/0", "0/1", "2/0", "2/1"]
    assert [found.tokens.row(row).tolist() for row in range(4)] == [[0], [0, 0], [2], [2, 2]]
    assert found.logprobs is not None and found.logprobs.values_T.tolist() == [-0.5 * t for t in (0, 0, 0, 2, 2, 2)]
    assert found.loss_mask.values_T.tolist() == [1] * 6


@pytest.mark.parametrize(("prompts", "count", "engines"), [(8, 4, 2), (7, 3, 2), (9, 9, 3), (4, 2, 3), (5, 2, 4)])
def test_where_engines_have_prompts_of_their_own_timing_decides_nothing(prompts: int, count: int, engines: int) -> None:
    """Whoever tells first, the portions are the same: of each engine's prompts its share. None is empty.

    Control: taken as one, the order in which the news comes makes other portions.
    """
    own = {engine: list(range(engine, prompts, engines)) for engine in range(engines)}
    of_each = {engine: random.Random(engine).sample(positions, len(positions)) for engine, positions in own.items()}
    found, mixed = set(), set()
    for seed in range(20):
        turns = random.Random(seed).sample([engine for engine in own for _ in own[engine]], prompts)
        left = {engine: iter(positions) for engine, positions in of_each.items()}
        exact, any_order = Portions(prompts, SAMPLES, count, engines, 3), Portions(prompts, SAMPLES, count, 1, 3)
        for engine in turns:
            position = next(left[engine])
            told(exact, engine, [position])
            told(any_order, engine, [position])
        found.add(tuple(tuple(exact.wait(number, waiting())) for number in range(count)))
        mixed.add(tuple(tuple(any_order.wait(number, waiting())) for number in range(count)))
    (portions,) = found
    assert all(portions) and sorted(sum(portions, ())) == list(range(prompts))
    assert len(mixed) > 1


def test_who_waits_goes_on_as_soon_as_the_portion_is_whole() -> None:
    """Not before: with one response missing it waits on."""
    portions, found = Portions(2, SAMPLES, 2, engines=1, policy_version=3), list[list[int]]()
    thread = threading.Thread(target=lambda: found.append(portions.wait(0, waiting())), daemon=True)
    portions.hear(news(0, [(1, 0), (0, 0)]))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive() and not found
    portions.hear(news(0, [(1, 1)]))
    thread.join(10)
    assert found == [[1]]


def test_what_ends_the_generation_ends_the_wait() -> None:
    """Also while somebody waits; and engines that reply without having told of all are not waited for."""
    portions, replies = Portions(2, SAMPLES, 2, engines=1, policy_version=3), waiting()
    threading.Timer(0.1, replies.set_exception, [OSError("rank 0 is lost")]).start()
    with pytest.raises(OSError, match="rank 0 is lost"):
        portions.wait(0, replies)
    done = waiting()
    done.set_result(DONE)
    with pytest.raises(RuntimeError, match="portion 1 of 2 is not whole"):
        portions.wait(0, done)
    told(portions, 0, [1])
    assert portions.wait(0, done) == [1]


def test_a_reply_repeats_what_was_told() -> None:
    """It adds nothing, nor do ranks that leave it to the first of their engine."""
    portions = Portions(1, SAMPLES, 1, engines=1, policy_version=3)
    told(portions, 0, [0])
    portions.hear(NOTHING)
    portions.hear(None)
    assert portions.wait(0, waiting()) == [0] and len(portions.responses([0]).tokens) == SAMPLES
