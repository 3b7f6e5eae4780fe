"""Games on real engines: an agent's row is its own conversation, drawn and shown tokens alike, and its own pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import decode_reply
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.engines.rollout.environments.host import Players
from penstock.engines.rollout.episode import Episode
from penstock.engines.rollout.games.loop import Game, GameLoop
from penstock.environments.worker import Reply
from tests.engines.played_prompts import save_prompts
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=False)
LIMIT, TURNS, SAMPLES, LONGEST = 64, 6, 3, 20
KINDS = ["two", "endless", "two", "broken", "crowded", "long", "alone", "two"]
AGENTS = ("host", "guest")
PROMPTS = Ragged.of([np.arange(4, 6)] * len(KINDS), np.int32)  # of the data: a game brings its own
FolderOf = Callable[[Shape], Path]


@dataclass(frozen=True)
class Conversation:
    """A row of a reply, and what vLLM saw and drew in each of its agent's turns."""

    kind: str
    agent: str
    prompt: list[int]
    tokens: list[int]
    mask: list[int]
    asked: list[list[int]]
    drawn: list[list[int]]
    of_the_other: list[list[int]]  # what was drawn for the other agent
    turns: int
    reward: float
    parts: dict[str, float]
    failure: str | None
    truncated: bool


def conversations(found: dict[str, Any]) -> tuple[EngineResponses, list[Conversation]]:
    """Take a reply apart, whose rows are by prompt, agent and sample. The host has a game's odd turns."""
    reply = decode_reply(Generate, found["reply"])
    assert reply is not None and reply.episodes is not None and reply.episodes.asked is not None
    played = reply.episodes
    assert played.asked is not None
    asked, drawn = ({name.partition("-")[2]: tokens for name, tokens in found[of].items()} for of in ("asked", "drawn"))
    masks = Ragged(played.loss_mask_T, reply.responses.offsets_B1)
    names = [(place, seat, n) for place in reply.positions_P.tolist() for seat in (0, 1) for n in range(SAMPLES)]
    assert len(names) == len(reply.responses)
    rows = []
    for row, (place, seat, sample) in enumerate(names):
        turns = [[f"{place}-{sample}-{turn}" for turn in range(first, TURNS + 1, 2)] for first in (1, 2)]
        own = [name for name in turns[seat] if name in asked]
        rows.append(
            Conversation(
                kind=KINDS[place],
                agent=AGENTS[seat],
                prompt=played.asked.prompts.row(row).tolist(),
                tokens=reply.responses.row(row).tolist(),
                mask=masks.row(row).tolist(),
                asked=[asked[name] for name in own],
                drawn=[drawn[name] for name in own],
                of_the_other=[drawn[name] for name in turns[1 - seat] if name in asked],
                turns=int(played.turns_B[row]),
                reward=float(played.rewards_B[row]),
                parts=played.parts_B[row],
                failure=played.failures_B[row],
                truncated=bool(reply.truncated_B[row]),
            )
        )
    return reply, rows


@pytest.fixture(scope="module")
def generated(one_rank: Ranks, folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same generation, twice."""
    folder = folder_of(SHAPE)
    table = save_prompts(tmp_path_factory.mktemp("prompts") / "train.parquet", PROMPTS, KINDS)
    one_rank.build(
        folder,
        ("actor", "rollout"),
        environment={
            "type": "tests.engines.rollout.games.talking:Talking",
            "agents": [*AGENTS],
            "max_turns": TURNS,
        },
        rollout={"prompts": len(KINDS), "samples": SAMPLES, "max_response_tokens": LIMIT, "max_sequences": 12},
        algorithm={"correction": {}},
        data={"max_prompt_tokens": LONGEST},
    )
    sampling = {"samples": SAMPLES, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": LIMIT}
    request = {
        "prompts": PROMPTS,
        "sampling": {**sampling, "ignore_eos": False, "seed": [7, 0, 0], "logprobs": True},
        "tokenizer": str(folder),
        "episodes": {"table": table, "prompt_ids": [f"train-{number:06d}" for number in range(len(KINDS))]},
    }
    return [one_rank.ask("watched_generate", arguments=request)[0] for _ in range(2)]


@pytest.fixture(scope="module")
def rows(generated: list[dict[str, Any]]) -> list[Conversation]:
    return conversations(generated[0])[1]


def test_an_agents_tokens_are_those_that_it_saw_and_drew(rows: list[Conversation], folder_of: FolderOf) -> None:
    """Its prompt is what it was shown first; each of its turns is drawn behind all that it saw before.

    Control: what the other agent drew would make other rows.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder_of(SHAPE))
    several = 0
    for row in rows:
        assert row.turns == len(row.drawn) == len(row.asked)
        if not row.drawn:
            continue
        assert tokenizer.decode(row.prompt).startswith(row.agent)
        assert row.asked[0] == row.prompt
        behind, mask = list[int](), list[int]()
        for turn, (asked, drawn) in enumerate(zip(row.asked, row.drawn, strict=True)):
            shown = asked[len(row.prompt) + len(behind) :]
            assert asked == [*row.prompt, *behind, *shown] and bool(shown) == bool(turn)
            behind, mask = [*behind, *shown, *drawn], [*mask, *[0] * len(shown), *[1] * len(drawn)]
        assert (row.tokens, row.mask) == (behind, mask)
        several += row.turns > 1
        own = [token for token, mine in zip(row.tokens, row.mask, strict=True) if mine]
        assert own != [token for turn in row.of_the_other for token in turn]
    assert several > 10


def test_what_an_agent_is_shown_later_stands_between_its_turns(rows: list[Conversation], folder_of: FolderOf) -> None:
    """It is about what the other has said meanwhile. Control: of the agent's own turns it says something else."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of(SHAPE))
    mixed = 0
    for row in (row for row in rows if row.turns > 1 and row.agent == "host"):
        shown = tokenizer.decode([token for token, mine in zip(row.tokens, row.mask, strict=True) if not mine])
        lengths = [len(tokenizer.decode(turn, skip_special_tokens=True)) for turn in row.of_the_other]
        own = [len(tokenizer.decode(turn, skip_special_tokens=True)) for turn in row.drawn]
        assert shown == "".join(f"({length})" for length in lengths[: row.turns - 1])
        mixed += shown != "".join(f"({length})" for length in own[: row.turns - 1])
    assert mixed


def test_an_agents_pay_is_its_own(rows: list[Conversation]) -> None:
    """Added up over the game's turns, with its named parts. Control: both are paid, and differently."""
    whole = [row for row in rows if row.kind == "two" and row.failure is None and not row.truncated]
    assert {row.agent for row in whole} == {*AGENTS}
    for row in whole:
        if row.agent == "host":
            assert (row.reward, row.parts) == (1.0, {})
            continue
        assert row.parts["turns"] == 4
        assert row.reward == pytest.approx(sum(row.parts.values())) and row.reward >= 4


def test_limits_cut_all_of_a_game_and_failures_fail_it(rows: list[Conversation]) -> None:
    """Control: a game that ended by its rules is neither cut nor failed."""
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    for row in by_kind["endless"]:
        assert row.truncated and row.turns <= TURNS // 2 and len(row.tokens) <= LIMIT
    assert sum(row.turns for row in by_kind["endless"]) > SAMPLES * 4
    for row in by_kind["crowded"]:
        assert row.truncated and row.failure is None and row.turns <= 1
    said = {"broken": "the guest has left", "long": f"more than data.max_prompt_tokens ({LONGEST})"}
    for kind, reason in said.items():
        failed = [row for row in by_kind[kind] if not row.truncated]
        assert failed and all(reason in str(row.failure) for row in failed)
    ended = [row for row in rows if row.kind == "two" and row.failure is None]
    assert any(not row.truncated for row in ended)


@pytest.mark.parametrize("cut", [True, False])
def test_a_cut_turn_that_ends_a_game_cuts_all_of_it(cut: bool) -> None:
    """Though the game says that it is done. Control: after a turn that ended by itself nobody is cut."""
    unused: Any = None
    loop = GameLoop(unused, SimpleNamespace(pool=None), Players(AGENTS, unused, chat=False), in_step=True)  # type: ignore[arg-type]
    game = Game(0, 7, [Episode(0, 0, 0, [], 7, 0) for _ in AGENTS], seat=1, cut=cut)
    game.speaker.truncated, loop._live[game.name] = cut, game
    loop._answered(game, Reply(done=True), 0)
    assert [seat.truncated for seat in game.seats] == [cut, cut]


def test_an_agent_that_had_no_turn_has_an_empty_row_and_its_pay(rows: list[Conversation]) -> None:
    """Control: who had a turn has tokens."""
    for row in (row for row in rows if row.kind == "alone"):
        assert bool(row.tokens) == (row.agent == "host")
        assert row.failure is None and row.reward > 0


def test_a_repeated_generation_is_the_same(generated: list[dict[str, Any]]) -> None:
    """Every row, and every log-prob. As text, since no reward, NaN, equals nothing."""
    (first, rows), (second, again) = map(conversations, generated)
    assert list(map(str, rows)) == list(map(str, again))
    assert first.logprobs_T is not None and second.logprobs_T is not None
    np.testing.assert_array_equal(first.logprobs_T, second.logprobs_T)
