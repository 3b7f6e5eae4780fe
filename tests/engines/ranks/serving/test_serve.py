"""Between two steps of a generation weights change and requests arrive; what has no business there waits.

Suffix: `_B` responses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import decode_reply, encode
from penstock.engines.commands.reshard import Resharded
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.session.rollout.carried import not_begun
from tests.engines.between_steps import shifted
from tests.engines.plain_commands import KINDS, command_of, numbered
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import load_unpacked

SHAPE = Shape("qwen3", tied=False)
PROMPTS = Ragged.of([np.arange(4, 5 + 2 * number) for number in range(6)], np.int32)
TOKENS, AFTER, SHIFT = 40, 15, 0.05
FolderOf = Callable[[Shape], Path]


def _asked(folder: Path, **sampling: Any) -> dict[str, Any]:
    defaults = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": TOKENS, "ignore_eos": True}
    asked = {"prompts": PROMPTS, "sampling": {**defaults, "seed": [7, 0, 0], **sampling}, "tokenizer": str(folder)}
    return {**asked, "carried": not_begun(0, environment=False)}  # so that it says which version sampled each token


@pytest.fixture(scope="module")
def rank(one_rank: Ranks, folder_of: FolderOf) -> Ranks:
    """An engine with weights of its own, which a reshard copies: the actor's may change while it generates."""
    folder = folder_of(SHAPE)
    one_rank.build(folder, ("actor", "rollout"))
    one_rank.ask("bind_without_sharing", folder=str(folder))
    return one_rank


def _between(ranks: Ranks, folder: Path, **what: Any) -> tuple[list[EngineResponses], list[int]]:
    """The replies of generations, and in which order they ended; the weights are as before."""
    (seen,) = ranks.ask("between_steps", arguments=_asked(folder), after=AFTER, **what)
    ranks.ask("reshard", version=0)
    return [_reply(reply) for reply in seen["replies"]], seen["ended"]


def _reply(fields: Any) -> EngineResponses:
    reply = decode_reply(Generate, fields)
    assert reply is not None
    return reply


def _rows(reply: EngineResponses) -> list[list[int]]:
    return [reply.responses.row(row).tolist() for row in range(len(reply.responses))]


@torch.no_grad()
def _likeliest(lm: Any, reply: EngineResponses, prompts: Ragged = PROMPTS) -> list[list[int]]:
    """For each response the tokens that a model finds likeliest, after the prompt and the response's own tokens."""
    found = []
    for position, row in zip(reply.positions_P.tolist(), _rows(reply), strict=True):
        prompt = prompts.row(position).tolist()
        logits = lm(input_ids=torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.argmax(-1).tolist())
    return found


# ---- weights -------------------------------------------------------------------------------------------------------


def test_tokens_after_a_reshard_are_the_new_policys(rank: Ranks, folder_of: FolderOf) -> None:
    """Each response says which version began and which ended it, and its tokens are those of one and of the other.

    The new policy is given all tokens before, as if it had drawn them. Controls: without a reshard all tokens are the
    first policy's; where keys of the older weights are kept they are another policy's than either.
    """
    folder = folder_of(SHAPE)
    old, new = load_unpacked(folder), shifted(load_unpacked(folder), SHIFT)
    (reply,), _ = _between(rank, folder, shift=SHIFT)
    assert (reply.first_version_B == 0).all() and (reply.last_version_B == 1).all()
    assert reply.policy_version == 0 and reply.versions_T is not None
    assert reply.versions_T.tolist() == [*[0] * AFTER, *[1] * (TOKENS - AFTER)] * len(PROMPTS)
    drawn, of_old, of_new = _rows(reply), _likeliest(old, reply), _likeliest(new, reply)
    assert [row[:AFTER] for row in drawn] == [row[:AFTER] for row in of_old]
    assert [row[AFTER:] for row in drawn] == [row[AFTER:] for row in of_new]
    assert [row[AFTER:] for row in drawn] != [row[AFTER:] for row in of_old], "the weights differ enough to be seen"

    (alone,), _ = _between(rank, folder)
    assert _rows(alone) == _likeliest(old, alone)
    assert (alone.first_version_B == 0).all() and (alone.last_version_B == 0).all()
    rank.ask("bind_without_sharing", folder=str(folder), rollout={"stream": {"staleness": 1, "keep_kv_cache": True}})
    (stale,), _ = _between(rank, folder, shift=SHIFT)
    rank.ask("bind_without_sharing", folder=str(folder))
    assert [row[AFTER:] for row in _rows(stale)] != [row[AFTER:] for row in _likeliest(new, stale)]
    assert stale.versions_T is not None and stale.versions_T.tolist() == reply.versions_T.tolist()


def test_a_response_that_begins_after_a_reshard_is_the_new_policys_alone(rank: Ranks, folder_of: FolderOf) -> None:
    """Of a generation that was begun after it; one that ended before has the old version alone."""
    folder = folder_of(SHAPE)
    new = shifted(load_unpacked(folder), SHIFT)
    (first, second), _ = _between(rank, folder, shift=SHIFT, other=_asked(folder, max_tokens=8))
    assert (first.last_version_B == 1).all()
    assert (second.first_version_B == 1).all() and (second.last_version_B == 1).all()
    assert second.policy_version == 1
    assert _rows(second) == _likeliest(new, second), "no prefix that is cached is of the older weights"


@pytest.mark.parametrize("keep_kv_cache", [False, True])
def test_no_prefix_of_older_weights_is_found(rank: Ranks, folder_of: FolderOf, keep_kv_cache: bool) -> None:
    """By prompts that fill blocks of the cache, which older weights have filled; those may still be in use.

    Control: where they are kept and not told apart, they are found.
    """
    folder = folder_of(SHAPE)
    rank.build(folder, ("actor", "rollout"), data={"max_prompt_tokens": 300})
    stream = {"staleness": 1, "keep_kv_cache": keep_kv_cache}
    rank.ask("bind_without_sharing", folder=str(folder), rollout={"stream": stream})
    new, prompts = shifted(load_unpacked(folder), SHIFT), Ragged.of([np.arange(300) % 50 + 4], np.int32)
    asked, other = ({**_asked(folder, max_tokens=tokens), "prompts": prompts} for tokens in (TOKENS, 8))
    what = {"after": AFTER, "shift": SHIFT, "other": other}
    rows = {}
    for salt in (True, False):
        (seen,) = rank.ask("between_steps", arguments=asked, salt=salt, **what)
        rank.ask("reshard", version=0)
        second = _reply(seen["replies"][1])
        rows[salt] = _rows(second) == _likeliest(new, second, prompts)
        assert (second.cached_tokens > 0) == (not keep_kv_cache or not salt)
    assert rows == {True: True, False: not keep_kv_cache}


# ---- requests ------------------------------------------------------------------------------------------------------


def test_a_generation_that_comes_later_shares_the_engine(rank: Ranks, folder_of: FolderOf) -> None:
    """A short one ends before the long one; each has the tokens that it has alone. Control: another seed's differ."""
    folder = folder_of(SHAPE)
    drawn = {"temperature": 1.0, "samples": 3}
    long, short = _asked(folder, **drawn), _asked(folder, **drawn, max_tokens=8, seed=[8, 0, 0])
    (seen,) = rank.ask("between_steps", arguments=long, after=AFTER, other=short)
    assert seen["ended"] == [1, 0]
    together = [_rows(_reply(reply)) for reply in seen["replies"]]
    alone = [_rows(rank.ask("generate", **asked)[0]) for asked in (long, short)]
    assert together == alone
    assert [row[:8] for row in together[0]] != together[1]


# ---- messages ------------------------------------------------------------------------------------------------------


class Asking:
    """Commands to a group whose replies are not waited for."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def begin(self, command: str, on_news: Any = None, **arguments: Any) -> Any:
        asked = encode(command_of(command, numbered(command, arguments))) if command in KINDS else arguments
        return self.ranks.group.begin(command, key=f"asked {next(self.ranks.keys)}", on_news=on_news, **asked)

    def replies(self, call: Any) -> list[Any]:
        answers = [answer["reply"] for answer in self.ranks.group.replies(call)]
        return [decode_reply(KINDS[call.command], answer) if call.command in KINDS else answer for answer in answers]


def _long(folder: Path) -> dict[str, Any]:
    """A generation of which some responses end soon, so that it is told of, and others take seconds."""
    asked = _asked(folder, temperature=1.0, samples=32, max_tokens=400)
    asked["sampling"]["ignore_eos"] = False
    return asked


@pytest.mark.parametrize(
    "layout",
    ["one rank", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two engines", "one engine of two ranks"))],
)
def test_a_reshard_is_answered_during_a_generation_and_an_export_after_it(
    layout: str, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Sent when the generation is seen to be under way. The export, which waits, holds up what comes behind it."""
    folder, ranks = folder_of(SHAPE), one_rank if layout == "one rank" else two_ranks
    tensor_parallel = 2 if layout == "one engine of two ranks" else 1
    rollout = {"prompts": 8, "samples": 4, "max_response_tokens": 400, "tensor_parallel": tensor_parallel}
    ranks.build(folder, ("actor", "rollout"), rollout=rollout)
    asking, under_way = Asking(ranks), threading.Event()
    generation = asking.begin("generate", on_news=lambda news: under_way.set(), **_long(folder))
    reader = threading.Thread(target=asking.replies, args=(generation,))
    reader.start()
    assert under_way.wait(60)
    resharded = asking.replies(asking.begin("reshard", version=1))
    assert not generation.answered
    assert all(isinstance(reply, Resharded) for reply in resharded)
    export = asking.begin("export", folder=str(tmp_path / "model"))
    behind = asking.begin("reshard", version=2)
    reader.join(60)
    assert asking.replies(behind) and export.answered
    replies = [reply for reply in asking.replies(generation) if reply is not None]
    assert len(replies) == (2 if layout == "two engines" else 1)
    assert not any(reply.first_version_B.any() for reply in replies)
    last = [set(reply.last_version_B.tolist()) for reply in replies]  # what was told of ended before, on one engine
    assert set.union(*last) == {0, 1}, "of all engines: one may have ended all of its own before"
    assert asking.replies(asking.begin("generate", **_asked(folder, max_tokens=2)))[0].policy_version == 2


def test_ranks_of_one_engine_begin_a_command_before_the_same_step(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """Though it reaches the second one ten steps later. Control: ranks that are engines of their own do not wait."""
    folder = folder_of(SHAPE)
    for tensor_parallel in (2, 1):
        rollout = {"prompts": 8, "samples": 2, "max_response_tokens": 40, "tensor_parallel": tensor_parallel}
        two_ranks.build(folder, ("actor", "rollout"), rollout=rollout)
        begun = two_ranks.ask_each("admitted", [{"arrives": 3}, {"arrives": 13}], steps=40)
        first = [answer["begun"].index(1) for answer in begun]
        if tensor_parallel == 2:
            assert begun[0] == begun[1]
            assert 13 <= first[0] <= 13 + 8
        else:
            assert first == [3, 13]


def test_a_comparison_does_not_disturb_a_generation(rank: Ranks, folder_of: FolderOf) -> None:
    """It ends before the generation does, and both have the tokens that they have alone."""
    folder = folder_of(SHAPE)
    rank.build(folder, ("actor", "rollout"), rollout={"prompts": 8, "samples": 4, "max_response_tokens": 400})
    comparison = {"prompts": PROMPTS, "tokens": 2, "seed": [1, 2, 3]}
    asking, asked = Asking(rank), _asked(folder, max_tokens=400, temperature=1.0, samples=16)  # takes seconds
    generation = asking.begin("generate", **asked)
    compared = asking.begin("sample_to_compare", **comparison)
    (sampled,) = asking.replies(compared)
    assert not generation.answered
    (generated,) = asking.replies(generation)
    assert _rows(generated) == _rows(rank.ask("generate", **asked)[0])
    alone = rank.ask("sample_to_compare", **comparison)[0]
    np.testing.assert_array_equal(sampled.responses.values_T, alone.responses.values_T)
