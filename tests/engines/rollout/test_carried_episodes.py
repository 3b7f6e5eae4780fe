"""Episodes that one generation leaves are gone on with by the next, whether their environments live or play again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses, EngineResponses
from penstock.engines.rollout.detokenize import decode
from penstock.engines.rollout.episode import heard, under_way
from penstock.session.rollout.carried import not_begun
from tests.engines.between_steps import shifted
from tests.engines.played_prompts import save_prompts
from tests.engines.playground import Playground
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import load_unpacked

SHAPE = Shape("qwen3", tied=False)
LIMIT, TURNS, SAMPLES, WANTED, SHIFT = 60, 4, 2, 4, 0.05
KINDS = ["plain", "greeted", "endless", "plain", "greeted", "endless", "plain", "greeted", "plain", "greeted"]
PROMPTS = Ragged.of([np.arange(4, 5 + number) for number in range(len(KINDS))], np.int32)
FolderOf = Callable[[Shape], Path]


@dataclass(frozen=True)
class Played:
    """A rank with an engine and environments, asked for generations."""

    ranks: Ranks
    folder: Path
    table: str

    def build(self, kind: str = "Playground", longest_prompt: int = 16, **settings: Any) -> None:
        """Begin with a new engine, and with environments that know nothing."""
        environment = {"type": f"tests.engines.playground:{kind}", "settings": settings, "max_turns": TURNS}
        sizes = {"prompts": len(KINDS), "samples": SAMPLES, "max_response_tokens": LIMIT, "max_sequences": 32}
        more = {"algorithm": {"correction": {}}, "data": {"max_prompt_tokens": longest_prompt}}
        self.ranks.build(self.folder, ("actor", "rollout"), environment=environment, rollout=sizes, **more)
        self.ranks.ask("reshard", version=0)

    def generate(
        self,
        seed: int,
        order: Any,
        carried: CarriedResponses | None,
        wanted: int | None,
        prompts: Ragged = PROMPTS,
    ) -> EngineResponses:
        """Play from prompts in an order."""
        (reply,) = self.ranks.ask(
            "generate",
            **self.asked(seed, prompts.take(np.asarray(order))),
            wanted=wanted,
            carried=carried,
            episodes={"table": self.table, "prompt_ids": [f"train-{number:06d}" for number in order]},
        )
        return reply

    def asked(self, seed: int, prompts: Ragged) -> dict[str, Any]:
        """Return what every generation is asked for."""
        sampling = {"samples": SAMPLES, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": LIMIT}
        sampled = {**sampling, "ignore_eos": False, "seed": [7, seed, 0], "logprobs": True}
        return {"prompts": prompts, "sampling": sampled, "tokenizer": str(self.folder)}

    def first(self) -> EngineResponses:
        """What a generation leaves that ends with the fourth prompt."""
        return self.generate(1, range(len(KINDS)), not_begun(0, environment=True), WANTED)


@pytest.fixture
def played(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> Played:
    """With the environment of the other tests of episodes."""
    path = tmp_path / "prompts" / "train.parquet"
    path.parent.mkdir()
    made = Played(one_rank, folder_of(SHAPE), save_prompts(path, PROMPTS, KINDS))
    made.build()
    return made


def arrays(reply: EngineResponses) -> list[Any]:
    """What has to be the same to the last bit."""
    assert reply.episodes is not None and reply.logprobs_T is not None and reply.versions_T is not None
    own = (reply.responses.values_T, reply.responses.offsets_B1, reply.logprobs_T, reply.versions_T, reply.positions_P)
    of_play = (reply.episodes.loss_mask_T, reply.episodes.turns_B, reply.episodes.rewards_B, reply.truncated_B)
    return [*(column.tolist() for column in own + of_play), reply.episodes.parts_B, reply.episodes.failures_B]


def test_episodes_go_on_from_where_they_were(played: Played) -> None:
    """No token of any is lost, and the environment has heard each turn once, whole, also one that two have sampled.

    Controls: some are in the middle of a turn, of some an answer is owed, some have ended; those not carried are lost.
    """
    first = played.first()
    left, order = first.left, first.left_P
    assert left is not None and left.episodes is not None and order is not None
    assert len(first.positions_P) == WANTED and first.unused_tokens == 0
    assert sorted([*first.positions_P.tolist(), *order.tolist()]) == list(range(len(KINDS)))
    lengths, ends = left.tokens.lengths_B, left.episodes.turn_ends
    inside = [lengths[row] > max([0, *ends.row(row)]) for row in range(len(ends))]
    assert any(inside) and left.episodes.owed_B.any() and left.ended_B.any()

    second = played.generate(2, order, left, None)
    assert second.left is not None and not len(second.left.tokens)
    assert second.episodes is not None and second.versions_T is not None
    assert second.unused_tokens == 0 and second.positions_P.tolist() == list(range(len(order)))
    tokenizer = AutoTokenizer.from_pretrained(played.folder)
    mask = Ragged(second.episodes.loss_mask_T, second.responses.offsets_B1)
    for row in range(len(second.responses)):
        tokens, own = second.responses.row(row).tolist(), mask.row(row).tolist()
        given = left.tokens.row(row).tolist()
        assert tokens[: len(given)] == given and len(tokens) <= LIMIT
        assert (len(tokens) == len(given)) >= bool(left.ended_B[row])
        environment = Playground()
        said = environment.reset({"kind": KINDS[order[row // SAMPLES]]}, int(left.episodes.seeds_B[row]))
        reward, turns = 0.0, 0
        while tokens:
            observed = tokenizer(said, add_special_tokens=False)["input_ids"] if said else []
            assert (tokens[: len(observed)], own[: len(observed)]) == (observed, [0] * len(observed))
            tokens, own = tokens[len(observed) :], own[len(observed) :]
            end = own.index(0) if 0 in own else len(own)
            (text,) = decode(tokenizer, Ragged.of([tokens[:end]], np.int32))
            step = environment.step(text)
            worth = step.reward["reward"] if isinstance(step.reward, dict) else step.reward
            reward, turns = reward + float(worth or 0.0), turns + 1
            said, tokens, own = step.observation, tokens[end:], own[end:]
        assert (second.episodes.rewards_B[row], second.episodes.turns_B[row]) == (reward, turns)
        assert second.episodes.failures_B[row] is None

    lost = played.generate(1, range(len(KINDS)), None, WANTED)
    assert lost.unused_tokens > 0 and lost.left is None and lost.versions_T is None


def test_an_environment_that_is_gone_is_played_again(played: Played) -> None:
    """Everything is the same to the last bit: after a start, where it has gone on otherwise since, and meanwhile.

    Control: under another seed the next tokens are others.
    """
    first = played.first()
    assert first.left is not None and first.left_P is not None
    alive = arrays(played.generate(2, first.left_P, first.left, None))
    assert arrays(played.generate(2, first.left_P, first.left, None)) == alive, "they have all ended meanwhile"

    played.first()
    half = played.generate(2, first.left_P, first.left, 2)
    assert half.left is not None and under_way(half.left)
    assert arrays(played.generate(2, first.left_P, first.left, None)) == alive, "some have gone on"

    played.first()
    played.generate(9, range(len(KINDS)), None, 3)  # as an evaluation does
    assert arrays(played.generate(2, first.left_P, first.left, None)) == alive, "another generation came between"

    played.build()
    assert arrays(played.generate(2, first.left_P, first.left, None)) == alive, "the process is another"
    assert arrays(played.generate(3, first.left_P, first.left, None)) != alive


def test_an_episode_whose_environment_answers_otherwise_begins_anew(played: Played) -> None:
    """Where it is played again. Controls: one that lives goes on, and in neither case does an episode fail."""
    played.build("Moody")
    first = played.first()
    assert first.left is not None and first.left.episodes is not None and first.left_P is not None
    had_answers = [
        bool((~first.left.episodes.loss_mask_T[a:b].astype(bool)).any())
        for a, b in zip(first.left.tokens.offsets_B1[:-1], first.left.tokens.offsets_B1[1:], strict=True)
    ]
    kept = {}
    for lives in (True, False):
        if not lives:
            played.build("Moody")
        second = played.generate(2, first.left_P, first.left, None)
        assert second.episodes is not None and second.episodes.failures_B == [None] * len(second.responses)
        kept[lives] = [
            second.responses.row(row).tolist()[: len(first.left.tokens.row(row))] == first.left.tokens.row(row).tolist()
            for row in range(len(second.responses))
        ]
    assert all(kept[True])
    under_way_B = ~first.left.ended_B & np.asarray(had_answers)
    assert under_way_B.sum() > 2 and not np.asarray(kept[False])[under_way_B].any()
    assert np.asarray(kept[False])[first.left.ended_B].all(), "what has ended needs no environment"


@pytest.mark.parametrize("keeps", [False, True])
def test_keys_of_an_episode_are_computed_again_or_kept(played: Played, keeps: bool) -> None:
    """Of prompts that fill blocks of vLLM's cache: kept, turns after an update are said over keys of older weights.

    Episodes that begin then are the new policy's alone either way, also from a prompt whose keys older weights made.
    """
    prompts = Ragged.of([np.arange(260 + at) % (40 + at) + 4 for at in range(len(KINDS))], np.int32)
    played.build(longest_prompt=300)
    played.ranks.ask("bind_without_sharing", folder=str(played.folder), rollout={"carry": {"keep_kv_cache": keeps}})
    first = played.generate(1, range(len(KINDS)), not_begun(0, environment=True), WANTED, prompts)
    assert first.left is not None and first.left_P is not None
    played.ranks.ask("between_steps", arguments=played.asked(9, PROMPTS), after=1, shift=SHIFT)
    order = np.concatenate([first.left_P, first.positions_P])
    second = played.generate(2, order, first.left, None, prompts)
    assert second.versions_T is not None and second.logprobs_T is not None and second.episodes is not None
    new, apart = shifted(load_unpacked(played.folder), SHIFT), dict[bool, list[float]]({True: [], False: []})
    offsets_B1 = second.responses.offsets_B1
    for row, (begin, end) in enumerate(zip(offsets_B1[:-1], offsets_B1[1:], strict=True)):
        at = int(second.positions_P[row // SAMPLES])
        own_T = (second.versions_T[begin:end] == 1) & (second.episodes.loss_mask_T[begin:end] > 0)
        said_T = _logprobs(new, prompts.row(int(order[at])).tolist(), second.responses.row(row).tolist())
        goes_on = at < len(first.left_P) and len(first.left.tokens.row(at * SAMPLES + row % SAMPLES)) > 0
        apart[goes_on] += np.abs(second.logprobs_T[begin:end] - said_T)[own_T].tolist()
    assert len(apart[True]) > 20 < len(apart[False])
    assert max(apart[False]) < 2e-4
    assert (np.mean(apart[True]) > 0.01) == keeps and (max(apart[True]) < 2e-4) == (not keeps)


@torch.no_grad()
def _logprobs(lm: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The log-probs of an episode's tokens under a model, at temperature 1, as this engine tells them."""
    logits_TV = lm(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    found_T: np.ndarray = logits_TV.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    return found_T


def test_what_an_environment_has_heard_is_all_that_it_was_told() -> None:
    """The tokens until the last turn's end, and where turns ended. Control: what comes behind does not matter."""
    assert heard([1, 2, 3, 4], [3]) == heard([1, 2, 3], [3]) == heard([1, 2, 3, 9, 9], [3])
    assert len({heard([1, 2, 3], ends) for ends in ([], [1], [3], [1, 3])} | {heard([1, 2, 4], [3])}) == 5
    assert heard([1], []) == heard([], [])
