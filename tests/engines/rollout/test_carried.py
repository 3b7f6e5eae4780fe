"""Responses that one generation leaves are gone on with by the next, under the policy that there is then.

Suffix: `_T` tokens of all responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import NO_ENGINE, CarriedResponses, EngineResponses
from penstock.engines.rollout.carried import carried_of, homes_of, request_of
from penstock.session.rollout.carried import left_over
from tests.engines.between_steps import shifted
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import load_unpacked

PROMPTS = Ragged.of([np.arange(4, 6 + number % 7) for number in range(12)], np.int32)
SAMPLES, LONGEST, WANTED, SHIFT = 2, 200, 5, 0.05
SHAPE = Shape("qwen3", tied=False)
FolderOf = Callable[[Shape], Path]
NOTHING = CarriedResponses(
    Ragged.of([], np.int32),
    np.empty(0, np.float32),
    np.empty(0, np.int32),
    np.empty(0, bool),
    np.empty(0, bool),
)


def test_what_is_carried_is_what_it_was() -> None:
    """Into requests and back: of two policies, of one, ended, and not begun."""
    carried = CarriedResponses(
        tokens=Ragged.of([[4, 5, 6, 7], [8, 9], [5, 5, 1], []], np.int32),
        logprobs_T=np.arange(9, dtype=np.float32) / 8,
        versions_T=np.asarray([3, 3, 5, 6, 6, 6, 2, 2, 6], np.int32),
        ended_B=np.asarray([False, False, True, False]),
        truncated_B=np.asarray([False, False, True, False]),
    )
    requests = [request_of(carried, number, SimpleNamespace(), number) for number in range(4)]  # type: ignore[arg-type]
    assert [request.versions for request in requests] == [[(0, 3), (2, 5), (3, 6)], [(0, 6)], [(0, 2), (2, 6)], []]
    assert_same(carried_of(requests, carried.ended_B.tolist()), carried)
    homes = carried_of(requests, carried.ended_B.tolist(), engine=3)
    assert homes.engines_B is not None and homes.engines_B.tolist() == [3, 3, NO_ENGINE, 3]
    homes_P = homes_of(homes, samples=2)
    assert homes_P is not None and homes_P.tolist() == [3, 3] and homes_of(carried, samples=2) is None


def assert_same(one: CarriedResponses, other: CarriedResponses) -> None:
    """Assert that two hold the same, in the same types."""
    for name in ("logprobs_T", "versions_T", "ended_B", "truncated_B"):
        values, others = getattr(one, name), getattr(other, name)
        assert values.dtype == others.dtype and np.array_equal(values, others), name
    assert np.array_equal(one.tokens.values_T, other.tokens.values_T)
    assert np.array_equal(one.tokens.offsets_B1, other.tokens.offsets_B1)


# ---- a real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def rank(one_rank: Ranks, folder_of: FolderOf) -> Iterator[Ranks]:
    """An engine with weights of its own, which a reshard copies."""
    sizes = {"prompts": len(PROMPTS), "samples": SAMPLES, "max_response_tokens": LONGEST, "max_sequences": 64}
    one_rank.build(folder_of(SHAPE), ("actor", "rollout"), rollout=sizes, algorithm={"correction": {}})
    one_rank.ask("bind_without_sharing", folder=str(folder_of(SHAPE)))
    yield one_rank
    one_rank.ask("reshard", version=0)


def _asked(folder: Path, seed: int, prompts: Ragged = PROMPTS, **more: Any) -> dict[str, Any]:
    sampling = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": LONGEST}
    asked = {**sampling, "ignore_eos": False, "seed": [7, seed, 0], "logprobs": True}
    return {"prompts": prompts, "sampling": asked, "tokenizer": str(folder), "carried": NOTHING, **more}


def _to_version_1(rank: Ranks, folder: Path) -> None:
    """Let the engine have other weights."""
    rank.ask("between_steps", arguments=_asked(folder, 9), after=1, shift=SHIFT)


@torch.no_grad()
def _logprobs(lm: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The log-probs of a response's tokens under a model."""
    logits = lm(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    found: np.ndarray = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    return found


def _rows(reply: EngineResponses) -> Iterator[tuple[int, list[int], np.ndarray, np.ndarray]]:
    """Yield each response's prompt, tokens, log-probs and versions."""
    assert reply.logprobs_T is not None and reply.versions_T is not None
    for row, tokens in enumerate(reply.responses.row(row).tolist() for row in range(len(reply.responses))):
        first, end = reply.responses.offsets_B1[row : row + 2]
        yield int(reply.positions_P[row // SAMPLES]), tokens, reply.logprobs_T[first:end], reply.versions_T[first:end]


def test_each_token_is_the_policys_whose_version_it_has(rank: Ranks, folder_of: FolderOf) -> None:
    """What five groups leave goes on under other weights: no token is lost, each with the log-prob of its own policy.

    Controls: the other policy's log-probs are others; what is not carried is lost, as ever.
    """
    folder = folder_of(SHAPE)
    (first,) = rank.ask("generate", **_asked(folder, 1, wanted=WANTED))
    left: CarriedResponses = first.left
    assert len(first.positions_P) == WANTED and first.unused_tokens == 0
    assert sorted([*first.positions_P.tolist(), *first.left_P.tolist()]) == list(range(len(PROMPTS)))
    assert left.ended_B.any() and not left.ended_B.all() and not left.versions_T.any()

    _to_version_1(rank, folder)
    order = first.left_P
    (second,) = rank.ask("generate", **_asked(folder, 2, PROMPTS.take(order), carried=left))
    assert second.policy_version == 1 and second.unused_tokens == 0 and not len(second.left_P)
    assert sorted(second.positions_P.tolist()) == list(range(len(order)))

    models = {0: load_unpacked(folder), 1: shifted(load_unpacked(folder), SHIFT)}
    mixed, told_apart = 0, list[float]()
    begun = {(at, sample): at * SAMPLES + sample for at in range(len(order)) for sample in range(SAMPLES)}
    for number, (at, tokens, logprobs, versions) in enumerate(_rows(second)):
        before = begun[at, number % SAMPLES]
        given = left.tokens.row(before).tolist()
        assert tokens[: len(given)] == given
        assert versions.tolist() == [0] * len(given) + [1] * (len(tokens) - len(given))
        assert (len(tokens) == len(given)) == left.ended_B[before]
        assert len(tokens) <= LONGEST and second.truncated_B[number] == (tokens[-1] != 1)
        by = {version: _logprobs(lm, PROMPTS.row(int(order[at])).tolist(), tokens) for version, lm in models.items()}
        own = np.where(versions == 0, by[0], by[1])
        np.testing.assert_allclose(logprobs, own, atol=2e-4)
        told_apart += np.abs(by[0] - by[1]).tolist()
        mixed += len(set(versions.tolist())) == 2
    assert mixed > 3
    assert np.mean(told_apart) > 0.02

    (dropped,) = rank.ask("generate", **_asked(folder, 1, wanted=WANTED, carried=None))
    assert dropped.left is None and dropped.versions_T is None and dropped.unused_tokens > 0


def test_what_is_required_is_waited_for_and_what_else_has_ended_is_kept(rank: Ranks, folder_of: FolderOf) -> None:
    """The prompts that come first make the batch, however long they take; groups that are too many go on, whole.

    Control: without the requirement others are faster.
    """
    folder = folder_of(SHAPE)
    (free,) = rank.ask("generate", **_asked(folder, 1, wanted=WANTED))
    order = np.concatenate([free.left_P[:3], free.positions_P, free.left_P[3:]])  # three slow ones first
    prompts = PROMPTS.take(order)
    (alone,) = rank.ask("generate", **_asked(folder, 3, prompts, wanted=WANTED))
    (reply,) = rank.ask("generate", **_asked(folder, 3, prompts, wanted=WANTED, required=3))
    assert set(range(3)) - set(alone.positions_P.tolist())
    assert set(range(3)) < set(reply.positions_P.tolist()) and len(reply.positions_P) == WANTED
    whole = reply.left.ended_B.reshape(-1, SAMPLES).all(axis=1)
    assert whole.sum() > alone.left.ended_B.reshape(-1, SAMPLES).all(axis=1).sum()

    kept = reply.left_P
    (after,) = rank.ask(
        "generate", **_asked(folder, 4, prompts.take(kept), wanted=int(whole.sum()), carried=reply.left)
    )
    assert sorted(after.positions_P.tolist()) == np.flatnonzero(whole).tolist(), "they are there at once"
    assert after.prompt_tokens == 0


def test_a_repeated_generation_goes_on_with_the_same_tokens(rank: Ranks, folder_of: FolderOf) -> None:
    """On the CPU each request has a stream of its own. Control: another iteration's go on otherwise."""
    folder = folder_of(SHAPE)
    (first,) = rank.ask("generate", **_asked(folder, 1, wanted=WANTED))
    prompts = PROMPTS.take(first.left_P)
    replies = [
        rank.ask("generate", **_asked(folder, seed, prompts, wanted=3, carried=first.left))[0] for seed in (2, 2, 3)
    ]
    assert_same(replies[0].left, replies[1].left)
    assert np.array_equal(replies[0].responses.values_T, replies[1].responses.values_T)
    assert not np.array_equal(replies[0].left.tokens.values_T, replies[2].left.tokens.values_T)


@pytest.mark.parametrize("keeps", [False, True])
def test_keys_are_computed_again_or_kept(rank: Ranks, folder_of: FolderOf, keeps: bool) -> None:
    """Of prompts that fill blocks of vLLM's cache: kept, they are found, and the next tokens are said over them.

    A prompt that begins then is the new policy's alone either way, also one whose keys older weights have made.
    """
    folder, prompts = folder_of(SHAPE), Ragged.of([np.arange(260 + at) % (40 + at) + 4 for at in range(12)], np.int32)
    rank.build(folder, ("actor", "rollout"), data={"max_prompt_tokens": 300}, algorithm={"correction": {}})
    rank.ask("bind_without_sharing", folder=str(folder), rollout={"carry": {"keep_kv_cache": keeps}})
    (first,) = rank.ask("generate", **_asked(folder, 1, prompts, wanted=WANTED))
    _to_version_1(rank, folder)
    order = np.concatenate([first.left_P, first.positions_P])
    (second,) = rank.ask("generate", **_asked(folder, 2, prompts.take(order), carried=first.left))
    new, apart = shifted(load_unpacked(folder), SHIFT), dict[bool, list[float]]({True: [], False: []})
    for at, tokens, logprobs, versions in _rows(second):
        own = _logprobs(new, prompts.row(int(order[at])).tolist(), tokens)
        apart[at < len(first.left_P)] += np.abs(logprobs - own)[versions == 1].tolist()
    assert len(apart[True]) > 50 < len(apart[False])
    assert max(apart[False]) < 2e-4
    assert (np.mean(apart[True]) > 0.01) == keeps and (max(apart[True]) < 2e-4) == (not keeps)
    under_way = int((~first.left.ended_B).sum())
    assert second.cached_tokens >= 256 * under_way or not keeps


def test_it_goes_on_without_log_probs(rank: Ranks, folder_of: FolderOf) -> None:
    """With the same tokens, where nobody asks for them. Control: where somebody does, each token has one."""
    folder, left = folder_of(SHAPE), []
    for logprobs in (True, False):
        asked = _asked(folder, 1, wanted=WANTED)
        asked["sampling"] |= {"logprobs": logprobs}
        (first,) = rank.ask("generate", **asked)
        further = _asked(folder, 2, PROMPTS.take(first.left_P), wanted=3, carried=first.left)
        further["sampling"] |= {"logprobs": logprobs}
        (second,) = rank.ask("generate", **further)
        assert (second.logprobs_T is None) != logprobs
        left += [first.left, second.left]
    for with_them, without in ((left[0], left[2]), (left[1], left[3])):
        assert len(with_them.logprobs_T) == len(with_them.tokens.values_T) > 0 == len(without.logprobs_T)
        assert np.array_equal(with_them.tokens.values_T, without.tokens.values_T)
        assert np.array_equal(with_them.versions_T, without.versions_T)


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"reproducible": False}])
def test_engines_end_together_and_leave_each_prompt_once(
    two_ranks: Ranks, folder_of: FolderOf, sizes: dict[str, Any]
) -> None:
    """Two engines with parts of their own, one engine of two ranks, two engines that fill the quota together."""
    folder = folder_of(SHAPE)
    rollout = {"prompts": len(PROMPTS), "samples": SAMPLES, "max_response_tokens": LONGEST, "max_sequences": 64}
    two_ranks.build(folder, ("actor", "rollout"), rollout=rollout | sizes, algorithm={"correction": {}})
    order, carried = np.arange(len(PROMPTS)), NOTHING
    for seed, required in enumerate((0, 3, 3)):
        asked = _asked(folder, seed, PROMPTS.take(order), wanted=WANTED, required=required, carried=carried)
        replies = [reply for reply in two_ranks.ask_each("generate", [asked] * 2) if reply is not None]
        answered = [at for reply in replies for at in reply.positions_P.tolist()]
        begun = [at for reply in replies for at in reply.left_P.tolist()]
        assert len(answered) == WANTED and set(range(required)) <= set(answered)
        assert len(set(answered + begun)) == len(answered + begun)
        assert sum(reply.unused_tokens for reply in replies) == 0
        left = sorted(set(range(len(order))) - set(answered))
        carried = left_over(carried, replies, left, SAMPLES)
        assert len(carried.tokens) == len(left) * SAMPLES
        order = np.concatenate([order[left], order[answered]])
