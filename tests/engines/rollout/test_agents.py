"""Agents on real engines: what they asked is the prompt, what was drawn is learnt from, what did not follow is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import decode_reply
from penstock.engines.commands.rollout import EngineResponses, Generate
from tests.engines.asking import BEHIND
from tests.engines.played_prompts import save_prompts
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=False)
LIMIT, TURNS, SAMPLES, LONGEST = 40, 4, 2, 20
KINDS = ["text", "tokens", "beside", "short", "endless", "long", "chat", "text", "beside"]
TOGETHER = ["at_once", "at_once", "choices", "choices", "too_many", "text", "gigantic", "stubborn"]
FolderOf = Callable[[Shape], Path]


@dataclass(frozen=True)
class Seen:
    """A generation, and what vLLM saw of it: of each request, by `position-sample-turn`, prompt and drawn tokens."""

    kinds: list[str]
    reply: EngineResponses
    asked: dict[str, list[int]]
    drawn: dict[str, list[int]]
    folder: Path

    def rows(self, *kinds: str) -> list[tuple[int, str]]:
        """The rows of episodes of these kinds, and the beginning of their requests' names."""
        names = [(position, sample) for position in self.reply.positions_P.tolist() for sample in range(SAMPLES)]
        return [(row, f"{p}-{sample}-") for row, (p, sample) in enumerate(names) if self.kinds[p] in kinds]


@pytest.fixture(scope="module")
def seen_of(
    one_rank: Ranks, folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[str]], Seen]:
    """Plays episodes of kinds on a new engine."""
    return lambda kinds: generated(one_rank, folder_of(SHAPE), tmp_path_factory.mktemp("prompts"), kinds)


@pytest.fixture(scope="module")
def seen(seen_of: Callable[[list[str]], Seen]) -> Seen:
    return seen_of(KINDS)


def generated(ranks: Ranks, folder: Path, prompts: Path, kinds: list[str], limit: int = LIMIT, **others: Any) -> Seen:
    of_data = Ragged.of([np.arange(4, 6)] * len(kinds), np.int32)  # agents bring their own
    table = save_prompts(prompts / "train.parquet", of_data, kinds)
    sizes = {"prompts": len(kinds), "samples": SAMPLES, "max_response_tokens": limit, "max_sequences": 12}
    environment = {"type": "tests.engines.asking:Asking", "max_turns": TURNS, **others}
    ranks.build(
        folder,
        ("actor", "rollout"),
        environment=environment,
        rollout=sizes,
        algorithm={"correction": {}},
        data={"max_prompt_tokens": LONGEST},
    )
    sampling = {"samples": SAMPLES, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": limit}
    request = {
        "prompts": of_data,
        "sampling": {**sampling, "ignore_eos": False, "seed": [7, 0, 0], "logprobs": True},
        "tokenizer": str(folder),
        "episodes": {"table": table, "prompt_ids": [f"train-{number:06d}" for number in range(len(kinds))]},
    }
    found = ranks.ask("watched_generate", arguments=request)[0]
    reply = decode_reply(Generate, found["reply"])
    assert reply is not None and reply.episodes is not None and reply.episodes.asked is not None
    asked, drawn = ({name.partition("-")[2]: tokens for name, tokens in found[of].items()} for of in ("asked", "drawn"))
    return Seen(kinds, reply, asked, drawn, folder)


def tokens_and_mask(reply: EngineResponses, row: int) -> tuple[list[int], list[int]]:
    assert reply.episodes is not None
    mask = Ragged(reply.episodes.loss_mask_T, reply.responses.offsets_B1)
    return reply.responses.row(row).tolist(), mask.row(row).tolist()


def test_prompt_turns_and_what_is_between_them_are_what_vllm_saw(seen: Seen) -> None:
    """Of text and of tokens, also of turns that the agent wanted short. Control: drawn tokens alone are masked 1."""
    tokenizer = AutoTokenizer.from_pretrained(seen.folder)
    between = tokenizer(BEHIND, add_special_tokens=False)["input_ids"]
    rows = seen.rows("text", "tokens", "short")
    assert len(rows) == 4 * SAMPLES
    played = seen.reply.episodes
    assert played is not None and played.asked is not None
    for row, name in rows:
        observed = [9, 8] if (row, name) in seen.rows("tokens") else between
        prompt = played.asked.prompts.row(row).tolist()
        behind: list[int] = []
        mask: list[int] = []
        for turn in range(1, int(played.turns_B[row]) + 1):
            assert seen.asked[f"{name}{turn}"] == prompt + behind
            drawn = seen.drawn[f"{name}{turn}"]
            behind, mask = [*behind, *drawn, *observed], [*mask, *[1] * len(drawn), *[0] * len(observed)]
            assert (row, name) not in seen.rows("short") or len(drawn) <= 2
        whole = len(behind) - len(observed)
        assert tokens_and_mask(seen.reply, row) == (behind[:whole], mask[:whole])
        assert seen.reply.truncated_B[row] or played.rewards_B[row] == 3
        assert played.asked.texts_B[row] == tokenizer.decode(prompt, skip_special_tokens=False)
    assert played.asked.prompts.row(seen.rows("tokens")[0][0]).tolist() == [4, 5, 6]


def test_a_turn_that_does_not_follow_is_answered_and_not_learnt_from(seen: Seen) -> None:
    """The chain goes on as if it had not been. Control: vLLM did draw it, from its own prompt; it is counted."""
    played, tokenizer = seen.reply.episodes, AutoTokenizer.from_pretrained(seen.folder)
    assert played is not None and played.asked is not None
    rows = [(row, name) for row, name in seen.rows("beside") if played.turns_B[row] == 3]
    assert len(rows) > SAMPLES
    for row, name in rows:
        tokens, _ = tokens_and_mask(seen.reply, row)
        first, last = seen.drawn[f"{name}1"], seen.drawn[f"{name}3"]
        assert seen.asked[f"{name}2"] == tokenizer("another story ")["input_ids"]
        assert seen.asked[f"{name}3"] == [*played.asked.prompts.row(row).tolist(), *tokens[: len(tokens) - len(last)]]
        assert tokens[: len(first)] == first and tokens[-len(last) :] == last
        assert played.asked.unbridged_B[row] == 1
    others = [row for row, _ in seen.rows("text", "tokens", "short", "endless")]
    assert not played.asked.unbridged_B[others].any()


def test_limits_cut_an_episode_and_say_so(seen: Seen) -> None:
    """One that wants no end is cut at its turns or tokens, though its agent raises what it reads; a first request that
    is too long, or a chat without a template, fails with the reason. Control: within the limits nothing is cut.
    """
    played = seen.reply.episodes
    assert played is not None
    for row, _ in seen.rows("endless"):
        assert seen.reply.truncated_B[row] and played.failures_B[row] is None
        assert played.turns_B[row] <= TURNS and len(tokens_and_mask(seen.reply, row)[0]) <= LIMIT
    for kind, said in (("long", f"more than data.max_prompt_tokens ({LONGEST})"), ("chat", "no chat template")):
        for row, _ in seen.rows(kind):
            assert said in str(played.failures_B[row]) and not tokens_and_mask(seen.reply, row)[0]
    fine = [row for row, _ in seen.rows("short")]
    assert not seen.reply.truncated_B[fine].any()


def test_rewards_are_the_agents(seen: Seen) -> None:
    """As many as the turns that they had. Control: the failed ones have none."""
    played = seen.reply.episodes
    assert played is not None
    fine = [row for row, _ in seen.rows("short")]
    assert (played.rewards_B[fine] == 3).all()
    assert np.isnan(played.rewards_B[[row for row, _ in seen.rows("long", "chat")]]).all()


@pytest.fixture(scope="module")
def together(seen_of: Callable[[list[str]], Seen]) -> Seen:
    return seen_of(TOGETHER)


def test_what_is_asked_at_once_is_drawn_alike_in_any_order(
    together: Seen, seen_of: Callable[[list[str]], Seen]
) -> None:
    """Of each request the prompt and what was drawn, and so what is learnt from. Of two that ask the same each has a
    draw of its own. Control: another sample of the same prompt has others.
    """
    other = seen_of([kind.replace("at_once", "at_once_in_another_order") for kind in TOGETHER])
    rows = together.rows("at_once")
    assert len(rows) == 2 * SAMPLES
    drawn = [[of.drawn[f"{name}{turn}"] for turn in range(1, 4)] for _, name in rows for of in (together, other)]
    asked = [[of.asked[f"{name}{turn}"] for turn in range(1, 4)] for _, name in rows for of in (together, other)]
    assert drawn[::2] == drawn[1::2] and asked[::2] == asked[1::2]
    assert drawn[0] != drawn[2] and any(first != second for first, second, _ in drawn)
    played = together.reply.episodes
    assert played is not None and played.asked is not None
    for row, name in rows:
        first, second, third = (together.asked[f"{name}{turn}"] for turn in range(1, 4))
        assert first == second != third, "the two that are the same, and the one that goes on nowhere"
        assert tokens_and_mask(together.reply, row) == tokens_and_mask(other.reply, row)
        assert played.asked.unbridged_B[row] >= 2


def test_the_first_choice_is_learnt_from_and_goes_on(together: Seen) -> None:
    """Others have its prompt, draws of their own, and are counted as turns that are not. Control: without, none is."""
    played = together.reply.episodes
    assert played is not None and played.asked is not None
    rows = [(row, name) for row, name in together.rows("choices") if f"{name}4" in together.drawn]
    assert rows
    for row, name in rows:
        prompts, drawn = ([of[f"{name}{turn}"] for turn in range(1, 5)] for of in (together.asked, together.drawn))
        assert prompts[0] == prompts[1] == prompts[2] and len({repr(tokens) for tokens in drawn[:3]}) > 1
        assert prompts[3][: len(prompts[0]) + len(drawn[0])] == prompts[0] + drawn[0]
        tokens, mask = tokens_and_mask(together.reply, row)
        assert tokens[: len(drawn[0])] == drawn[0] and tokens[-len(drawn[3]) :] == drawn[3]
        assert sum(mask) == len(drawn[0]) + len(drawn[3])
        assert (played.asked.unbridged_B[row], played.turns_B[row], played.rewards_B[row]) == (2, 4, 4)
    assert not played.asked.unbridged_B[[row for row, _ in together.rows("text")]].any()


def test_more_choices_than_turns_are_refused_by_name(together: Seen) -> None:
    """It could never be had, so the episode fails. Control: `endless`, above, is cut where it has had its turns."""
    played = together.reply.episodes
    assert played is not None
    for row, _ in together.rows("too_many"):
        assert f"'n' is 9, more than an episode's turns: environment.max_turns={TURNS}" in str(played.failures_B[row])


def test_a_gigantic_request_is_refused_before_it_becomes_tokens(together: Seen) -> None:
    """As text by its characters, and as tokens by their number; the episode goes on, and ends with its reward.

    Control: the turn that it had before was drawn, and nothing after it.
    """
    played = together.reply.episodes
    assert played is not None
    for row, name in together.rows("gigantic"):
        assert played.failures_B[row] is None and played.rewards_B[row] == 3
        assert f"{name}1" in together.drawn and f"{name}2" not in together.drawn
        assert played.parts_B[row] == {"requests/refused": 2.0}


def test_one_that_never_stops_asking_for_what_it_cannot_have_is_cut(together: Seen) -> None:
    """After as many refusals as it may have turns and one; what it is told later is that it was cut, which is no
    refusal of its own. Control: `gigantic`, above, is refused less often, and is not.
    """
    played = together.reply.episodes
    assert played is not None
    for row, name in together.rows("stubborn"):
        assert together.reply.truncated_B[row] and f"{name}1" not in together.drawn
        assert (played.failures_B[row], played.turns_B[row]) == (None, 0)
        assert played.parts_B[row] == {"requests/refused": float(TURNS)}
    assert not any(together.reply.truncated_B[row] for row, _ in together.rows("gigantic"))
