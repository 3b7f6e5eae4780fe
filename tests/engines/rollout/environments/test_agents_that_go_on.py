"""Agents' episodes that one generation leaves are gone on with by the next, as those of an environment are.

An agent's request waits over the end of a generation, and over a change of weights. Where the engine does not have the
episode any more it is played again from its turns, or begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import decode_reply
from penstock.engines.commands.rollout import CarriedResponses, EngineResponses, Generate
from penstock.session.rollout.carried import not_begun
from tests.engines.played_prompts import save_prompts
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=False)
LIMIT, TURNS, SAMPLES, WANTED = 60, 4, 2, 4
PLAYED = ["plain", "plain", "endless", "plain", "long", "endless", "plain", "plain", "plain", "endless"]
ASKED = ["short", *["beside", "choices", "at_once"] * 3]
LONGEST_S = 15.0  # that an agent may take: a busy machine is slow
FolderOf = Callable[[Shape], Path]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Played:
    """A rank with an engine and agents, asked for generations."""

    ranks: Ranks
    folder: Path
    place: Path

    def build(self, kind: str, **others: Any) -> None:
        """Begin with a new engine, and with environments that know nothing."""
        environment = {"type": f"tests.engines.{kind}", "max_turns": TURNS, **others}
        sizes = {"prompts": len(PLAYED), "samples": SAMPLES, "max_response_tokens": LIMIT, "max_sequences": 32}
        correction = {"algorithm": {"correction": {}}}
        self.ranks.build(self.folder, ("actor", "rollout"), environment=environment, rollout=sizes, **correction)
        self.ranks.ask("bind_without_sharing", folder=str(self.folder))
        self.ranks.ask("reshard", version=0)

    def arguments(self, kinds: list[str], seed: int, carried: CarriedResponses, wanted: int | None) -> dict[str, Any]:
        tokens = AutoTokenizer.from_pretrained(self.folder)("go ")["input_ids"]
        prompts = Ragged.of([tokens] * len(kinds), np.int32)
        table = self.place / f"{len(list(self.place.iterdir()))}" / "train.parquet"
        table.parent.mkdir()
        sampling = {"samples": SAMPLES, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": LIMIT}
        return {
            "prompts": prompts,
            "sampling": {**sampling, "ignore_eos": False, "seed": [7, seed, 0], "logprobs": True},
            "tokenizer": str(self.folder),
            "wanted": wanted,
            "carried": carried,
            "episodes": {
                "table": save_prompts(table, prompts, kinds),
                "prompt_ids": [f"train-{number:06d}" for number in range(len(kinds))],
            },
        }

    def first(self, kinds: list[str], wanted: int = WANTED) -> EngineResponses:
        """What a generation leaves that ends with the fourth prompt, or another."""
        return self._generated(self.arguments(kinds, 1, not_begun(0, environment=True), wanted))

    def second(self, kinds: list[str], first: EngineResponses, seed: int = 2, version: int = 1) -> EngineResponses:
        """What goes on with it, under the next policy version."""
        assert first.left is not None and first.left_P is not None
        self.ranks.ask("reshard", version=version)
        order = [kinds[position] for position in first.left_P.tolist()]
        return self._generated(self.arguments(order, seed, first.left, None))

    def _generated(self, arguments: dict[str, Any]) -> EngineResponses:
        (reply,) = self.ranks.ask("generate", **arguments)
        return reply  # type: ignore[no-any-return]


@pytest.fixture
def played(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> Played:
    return Played(one_rank, folder_of(SHAPE), tmp_path)


def arrays(reply: EngineResponses) -> list[Any]:
    """What has to be the same to the last bit, in what has ended and in what is left."""
    assert reply.episodes is not None and reply.logprobs_T is not None and reply.versions_T is not None
    left = reply.left
    assert left is not None and left.episodes is not None and reply.left_P is not None
    own = (reply.responses.values_T, reply.responses.offsets_B1, reply.logprobs_T, reply.versions_T, reply.positions_P)
    of_play = (reply.episodes.loss_mask_T, reply.episodes.turns_B, reply.episodes.rewards_B, reply.truncated_B)
    of_left = (left.tokens.values_T, left.tokens.offsets_B1, left.logprobs_T, left.versions_T, left.ended_B)
    of_episodes = (left.episodes.seeds_B, left.episodes.loss_mask_T, left.episodes.turn_ends.values_T)
    columns = (*own, *of_play, *of_left, *of_episodes, left.episodes.owed_B, left.truncated_B, reply.left_P)
    return [*(repr(column.tolist()) for column in columns), reply.episodes.failures_B, reply.unused_tokens]


def test_they_go_on_as_those_inside(played: Played) -> None:
    """Tokens, log-probs, masks, the policy version of each token, rewards, and what is left: to the last bit, whether
    their agents live or are played again. No token is lost, no turn is drawn a second time.

    Controls: some are in the middle of a turn, of some the agent is asked; under another seed the rest is another.
    """
    found = {}
    for kind in ("playground:Playground", "playground:PlaygroundAgent"):
        played.build(kind)
        first = played.first(PLAYED)
        found[kind] = (first, played.second(PLAYED, first))
    (inside, inside_after), (asked, asked_after) = found.values()
    assert arrays(asked) == arrays(inside) and arrays(asked_after) == arrays(inside_after)
    left = asked.left
    assert left is not None and left.episodes is not None and not inside_after.unused_tokens
    ends = left.episodes.turn_ends
    begun = [len(left.tokens.row(row)) > max([0, *ends.row(row)]) for row in range(len(ends))]
    assert left.engines_B is not None and set(left.engines_B[~left.ended_B]) == {0}
    assert any(begun) and left.ended_B.any() and {0, 1} == {*asked_after.versions_T.tolist()}  # type: ignore[union-attr]

    played.build("playground:PlaygroundAgent")  # the process is another
    assert arrays(played.second(PLAYED, asked)) == arrays(asked_after)
    assert arrays(played.second(PLAYED, asked)) == arrays(asked_after), "they have all ended meanwhile"
    assert arrays(played.second(PLAYED, asked, seed=3)) != arrays(asked_after)


@pytest.mark.exhaustive
def test_what_is_asked_beside_a_conversation_goes_on_as_well(played: Played) -> None:
    """Turns beside it, choices and several at once, of which a generation has drawn some, and begun others. An episode
    with such turns, of which not all is kept, begins anew where its agent is gone: alike each time. Controls: an agent
    waits for longer than `timeout_s` for the next generation, and does not fail; one that is alive does not begin
    anew; what has ended is kept.
    """
    played.build("asking:Asking", timeout_s=LONGEST_S)
    first = played.first(ASKED, 1)
    left = first.left
    assert left is not None and left.episodes is not None and first.left_P is not None
    kept = left.episodes.asked
    assert not first.unused_tokens and kept is not None
    assert ((kept.unbridged_B > 0) & ~left.ended_B).sum() > 2
    time.sleep(LONGEST_S + 1)
    alive = played.second(ASKED, first)
    assert alive.episodes is not None and alive.episodes.failures_B == [None] * len(alive.responses)
    assert not alive.unused_tokens and alive.left is not None and not len(alive.left.tokens)
    assert alive.episodes.asked is not None and (alive.episodes.asked.unbridged_B >= kept.unbridged_B).all()
    for row in range(len(left.tokens)):
        before, after = left.tokens.row(row).tolist(), alive.responses.row(row).tolist()
        assert before == after[: len(before)]
        assert before == after or not left.ended_B[row]
    anew = []
    for _ in range(2):
        played.build("asking:Asking")
        again = played.second(ASKED, first)
        assert again.episodes is not None and again.episodes.failures_B == [None] * len(again.responses)
        for row in np.flatnonzero(left.ended_B).tolist():
            assert left.tokens.row(row).tolist() == again.responses.row(row).tolist()
        anew.append(arrays(again))
    assert anew[0] == anew[1] != arrays(alive)


@pytest.mark.exhaustive
def test_one_that_asks_otherwise_begins_anew(played: Played) -> None:
    """Where it is played again. Controls: one that lives goes on, one that has ended is kept, and none fails."""
    played.build("playground:MoodyAgent")
    first = played.first(PLAYED)
    left = first.left
    assert left is not None and left.episodes is not None
    kept = {}
    for lives in (True, False):
        if not lives:
            played.build("playground:MoodyAgent")
        second = played.second(PLAYED, first)
        assert second.episodes is not None and second.episodes.failures_B == [None] * len(second.responses)
        kept[lives] = np.asarray(
            [
                second.responses.row(row).tolist()[: len(left.tokens.row(row))] == left.tokens.row(row).tolist()
                for row in range(len(second.responses))
            ]
        )
    heard_B = left.episodes.turn_ends.lengths_B - left.episodes.owed_B > 0  # whose policy has read an answer
    assert kept[True].all() and (heard_B & ~left.ended_B).sum() > 2
    assert not kept[False][heard_B & ~left.ended_B].any() and kept[False][left.ended_B].all()


@pytest.mark.exhaustive
def test_weights_change_while_they_play_as_for_those_inside(played: Played) -> None:
    """After a number of steps. Control: some episodes have tokens of both policies."""
    found = {}
    for kind in ("playground:Playground", "playground:PlaygroundAgent"):
        played.build(kind)
        arguments = played.arguments(PLAYED, 1, not_begun(0, environment=True), WANTED)
        (seen,) = played.ranks.ask("between_steps", arguments=arguments, after=6, shift=0.05)
        first = decode_reply(Generate, seen["replies"][0])
        assert first is not None
        found[kind] = (first, played.second(PLAYED, first, version=2))
    (inside, inside_after), (asked, asked_after) = found.values()
    assert arrays(asked) == arrays(inside) and arrays(asked_after) == arrays(inside_after)
    assert asked_after.versions_T is not None and {*asked_after.versions_T.tolist()} == {0, 1, 2}
    assert (inside.first_version_B < inside.last_version_B).any()
