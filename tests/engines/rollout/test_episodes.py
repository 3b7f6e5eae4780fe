"""Episodes: the trainer sees exactly the tokens that the policy saw and drew, and learns from those it drew alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.message import decode_reply
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.engines.rollout.environments.host import stop_tokens
from penstock.engines.rollout.episodes import turn_seed
from tests.engines.played_prompts import save_prompts
from tests.engines.playground import Playground
from tests.engines.rows import LOSS, SPLIT, gathered, with_columns, write_rows
from tests.engines.shared_ranks import EOS, Ranks, Shape

SHAPE = Shape("qwen3", tied=False)
LIMIT, TURNS, SAMPLES = 40, 4, 3
KINDS = ["plain", "greeted", "endless", "long", "broken", "endless", "flooded", "plain", "greeted", "plain"]
PROMPTS = Ragged.of([np.arange(4, 5 + number) for number in range(len(KINDS))], np.int32)
ENVIRONMENT = {
    "type": "tests.engines.playground:Playground",
    "settings": {"turns": 3},
    "max_turns": TURNS,
}
FolderOf = Callable[[Shape], Path]


@dataclass(frozen=True)
class Episode:
    """One row of a reply."""

    kind: str
    tokens: list[int]
    mask: list[int]
    turns: int
    reward: float
    parts: dict[str, float]
    failure: str | None
    truncated: bool

    def segments(self) -> list[tuple[int, list[int]]]:
        """Runs of drawn tokens (1) and observations (0), in order."""
        cuts = [0, *(np.flatnonzero(np.diff(self.mask)) + 1).tolist(), len(self.mask)]
        return [(self.mask[a], self.tokens[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if a < b]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prompts as a prompt table on disk, with the column that the environment reads."""
    return save_prompts(tmp_path_factory.mktemp("prompts") / "train.parquet", PROMPTS, KINDS)


def _build(ranks: Ranks, folder: Path, environment: dict[str, Any] = ENVIRONMENT, **rollout: Any) -> None:
    sizes = {"prompts": len(KINDS), "samples": SAMPLES, "max_response_tokens": LIMIT, "max_sequences": 12}
    correction = {"algorithm": {"correction": {}}}  # for log-probs of the rollout
    ranks.build(folder, ("actor", "rollout"), environment=environment, rollout={**sizes, **rollout}, **correction)


def _request(folder: Path, table: str, wanted: int | None = None, **sampling: Any) -> dict[str, Any]:
    defaults = {"samples": SAMPLES, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": LIMIT}
    return {
        "prompts": PROMPTS,
        "sampling": {**defaults, "ignore_eos": False, "seed": [7, 0, 0], "logprobs": True, **sampling},
        "tokenizer": str(folder),
        "wanted": wanted,
        "episodes": {"table": table, "prompt_ids": [f"train-{number:06d}" for number in range(len(KINDS))]},
    }


def _episodes(replies: list[EngineResponses], prompts: int = len(KINDS)) -> dict[tuple[int, int], Episode]:
    """Every episode by its prompt's position and its sample."""
    found: dict[tuple[int, int], Episode] = {}
    for reply in replies:
        played, tokens = reply.episodes, reply.responses
        assert played is not None
        mask = Ragged(played.loss_mask_T, tokens.offsets_B1)
        names = [(position, sample) for position in reply.positions_P.tolist() for sample in range(SAMPLES)]
        for row, name in enumerate(names):
            assert name not in found
            found[name] = Episode(
                KINDS[name[0]],
                tokens.row(row).tolist(),
                mask.row(row).tolist(),
                int(played.turns_B[row]),
                float(played.rewards_B[row]),
                played.parts_B[row],
                played.failures_B[row],
                bool(reply.truncated_B[row]),
            )
    assert len(found) == SAMPLES * prompts
    return found


# ---- the tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A generation on one rank, which waited for no environment, with all that vLLM saw of it."""

    ranks: Ranks
    folder: Path
    reply: EngineResponses
    asked: dict[str, list[int]]  # of each request the prompt
    drawn: dict[str, list[int]]  # and the tokens

    @property
    def rows(self) -> Rows:
        """As the trainer gets them."""
        responses, played = self.reply.responses, self.reply.episodes
        assert played is not None
        mask = Ragged(played.loss_mask_T, responses.offsets_B1)
        return Rows(PROMPTS.take(np.repeat(self.reply.positions_P, SAMPLES)), responses, mask, {})


@pytest.fixture(scope="module")
def watched(one_rank: Ranks, folder_of: FolderOf, table: str) -> Watched:
    """The tests of this module share the engine, too."""
    folder = folder_of(SHAPE)
    _build(one_rank, folder)
    seen = one_rank.ask("watched_generate", arguments=_request(folder, table))[0]
    reply = decode_reply(Generate, seen["reply"])
    assert reply is not None
    return Watched(one_rank, folder, reply, seen["asked"], seen["drawn"])


def test_the_trainer_sees_what_vllm_saw_and_drew(watched: Watched) -> None:
    """Each turn's prompt is all tokens before it, its tokens are those drawn, and between them lies the observation.

    Control: the same texts tokenised again are other tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(watched.folder)
    # Requests are named <generation>-<prompt>-<sample>-<turn>.
    asked, drawn = (
        {name.partition("-")[2]: tokens for name, tokens in named.items()} for named in (watched.asked, watched.drawn)
    )
    requests = 0
    changed = 0
    for (position, sample), episode in _episodes([watched.reply]).items():
        prompt, behind = PROMPTS.row(position).tolist(), list[int]()
        environment = Playground()
        greeting = environment.reset({"kind": episode.kind}, turn_seed([7, 0, 0], position, sample, 0))
        observed = greeting if episode.turns else None
        for turn in range(1, episode.turns + 1):
            behind += tokenizer(observed, add_special_tokens=False)["input_ids"] if observed else []
            name = f"{position}-{sample}-{turn}"
            assert asked[name] == prompt + behind
            behind += drawn[name]
            requests += 1
            if episode.failure is None:
                text = tokenizer.decode(drawn[name], skip_special_tokens=True)
                observed = environment.step(text).observation
        assert episode.tokens == behind
        own = [token for mask, tokens in episode.segments() if mask for token in tokens]
        assert own == [token for turn in range(1, episode.turns + 1) for token in drawn[f"{position}-{sample}-{turn}"]]
        changed += tokenizer(tokenizer.decode(behind), add_special_tokens=False)["input_ids"] != behind
    assert requests == len(asked) == len(drawn)
    assert requests > 45, "most episodes have several turns"
    assert changed > 0


def test_turns_end_at_stop_texts_and_at_the_end_of_sequence(watched: Watched) -> None:
    """Both belong to the turn, and neither occurs inside one; an unknown token's text has a stop text in it."""
    tokenizer = AutoTokenizer.from_pretrained(watched.folder)
    ends = {EOS, *stop_tokens(tokenizer, Playground.stop)}
    last = []
    for episode in _episodes([watched.reply]).values():
        for mask, tokens in episode.segments():
            if mask:
                assert not ends & set(tokens[:-1])
                assert tokens[-1] in ends or episode.truncated
                last.append(tokens[-1])
    assert len(ends & set(last)) > 5


def test_the_trainers_logprobs_of_drawn_tokens_are_those_they_were_drawn_with(watched: Watched, tmp_path: Path) -> None:
    """Teacher-forced over turns and observations at the rollout's temperature. Control: at another one they differ."""
    rows = watched.rows
    path = write_rows(tmp_path / "rows.parquet", rows)
    own_T = rows.mask.values_T > 0
    theirs_T = watched.reply.logprobs_T
    assert theirs_T is not None
    assert (theirs_T[~own_T] == 0).all()
    gaps = {}
    for temperature in (0.8, 1.0):
        arguments = {"path": path, "role": "actor", "temperature": temperature, "budget": 10_000}
        ours_T = gathered(rows, watched.ranks.ask("logprobs", **arguments))
        gaps[temperature] = np.abs(ours_T - theirs_T)[own_T].max()
    assert gaps[0.8] < 1e-4
    assert gaps[1.0] > 0.1
    assert 0.1 < own_T.mean() < 0.9


def test_the_update_learns_from_drawn_tokens_alone(watched: Watched, tmp_path: Path) -> None:
    """What an observation's columns say moves neither loss nor gradient. Control: those of a drawn token do."""
    rows, random = watched.rows, np.random.default_rng(0)
    own_T = rows.mask.values_T > 0
    advantages_T = random.normal(size=len(own_T)).astype(np.float32)
    old_T = random.normal(-2, 0.1, size=len(own_T)).astype(np.float32)
    noise_T = 5 * random.normal(size=len(own_T)).astype(np.float32)

    def update(name: str, where_T: np.ndarray) -> tuple[float, float]:
        columns = {"advantages": advantages_T + noise_T * where_T, "logprobs_old": old_T + noise_T * where_T}
        path = write_rows(tmp_path / f"{name}.parquet", with_columns(rows, columns))
        split = {**SPLIT, "samples": SAMPLES, "together": SAMPLES, "max_response_tokens": LIMIT}
        reply = watched.ranks.ask("update_actor", path=path, version=0, split=split, loss=LOSS, learning_rate=0.0)[0]
        return reply["loss"], reply["grad_norm"]

    plain = update("plain", np.zeros_like(own_T))
    assert plain[1] > 0
    assert update("observations", ~own_T) == plain
    one_T = np.zeros_like(own_T)
    one_T[np.flatnonzero(own_T)[7]] = True
    assert update("drawn", one_T) != plain


# ---- how episodes end ----------------------------------------------------------------------------------------------


def test_how_episodes_end(watched: Watched) -> None:
    """By the environment, by the limits of turns and tokens, or by a failure; rewards are summed up until then."""
    by_kind: dict[str, list[Episode]] = {}
    for episode in _episodes([watched.reply]).values():
        by_kind.setdefault(episode.kind, []).append(episode)
        assert len(episode.tokens) <= LIMIT
        assert episode.turns <= TURNS
        assert not episode.tokens or episode.mask[-1] == 1, "an observation that nobody answers is left out"

    finished = [episode for kind in ("plain", "greeted") for episode in by_kind[kind] if not episode.truncated]
    assert len(finished) > 5
    for episode in finished:
        assert (episode.turns, episode.reward, episode.failure) == (3, 2.5, None)
        assert episode.parts == {"right": 1.0, "reward": 2.0}
        assert episode.mask[0] == (episode.kind == "plain")

    assert all(episode.truncated for episode in by_kind["endless"])
    assert TURNS in {episode.turns for episode in by_kind["endless"]}
    for episode in by_kind["long"]:  # the observation leaves no room: the episode is cut before it
        assert (episode.turns, episode.reward, episode.truncated) == (1, 0.5, True)
    for episode in by_kind["broken"]:
        assert "LookupError: no such tool (playground.py" in str(episode.failure)
        assert (episode.turns, np.isnan(episode.reward)) == (1, True)
    for episode in by_kind["flooded"]:
        assert (episode.tokens, episode.turns, episode.truncated) == ([], 0, True)
        assert "the first observation has 100 tokens" in str(episode.failure)


# ---- the same again ------------------------------------------------------------------------------------------------


def test_a_generation_depends_on_nothing_but_its_seed(
    watched: Watched, two_ranks: Ranks, folder_of: FolderOf, table: str
) -> None:
    """Again on the same rank bit for bit, log-probs too; the same tokens on two ranks, and where nobody waited.

    Control: another seed.
    """
    folder, one_rank = watched.folder, watched.ranks
    _build(two_ranks, folder)
    one_rank.ask("reshard", version=0)  # an update comes before, of learning rate 0
    alone, again = (one_rank.ask("generate", **_request(folder, table)) for _ in range(2))
    for one, other in zip(_arrays(alone[0]), _arrays(again[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    shared = two_ranks.ask("generate", **_request(folder, table))
    assert [len(reply.positions_P) for reply in shared] == [5, 5]
    assert _as_text(shared) == _as_text(alone) == _as_text([watched.reply])
    assert _as_text(one_rank.ask("generate", **_request(folder, table, seed=[8, 0, 0]))) != _as_text(alone)


def test_a_quota_ends_a_generation_with_the_episodes_that_ended_first(
    watched: Watched, two_ranks: Ranks, folder_of: FolderOf, table: str
) -> None:
    """They are those of the whole generation, the ones left have taken most turns, and the next is as if none had been.

    Also on two engines, and where nobody waits for environments.
    """
    folder, one_rank = watched.folder, watched.ranks
    (whole,) = one_rank.ask("generate", **_request(folder, table))
    (first,) = one_rank.ask("generate", **_request(folder, table, wanted=4))
    (again,) = one_rank.ask("generate", **_request(folder, table))
    every, taken = _episodes([whole]), _episodes([first], prompts=4)
    assert {name: repr(episode) for name, episode in taken.items()}.items() <= _as_text([whole]).items()
    assert _as_text([again]) == _as_text([whole])
    assert first.unused_tokens > 0 == whole.unused_tokens
    turns = {name: episode.turns for name, episode in every.items()}
    left = {position for position, _ in every} - {position for position, _ in taken}
    assert min(max(turns[at, n] for n in range(SAMPLES)) for at in left) >= max(turns[name] for name in taken) - 1

    for reproducible in (True, False):
        _build(two_ranks, folder, reproducible=reproducible)
        for _ in range(2):
            _episodes(two_ranks.ask("generate", **_request(folder, table, wanted=4)), prompts=4)


def test_calls_that_wait_for_each_other_play_the_same_episodes(
    watched: Watched, folder_of: FolderOf, table: str
) -> None:
    """An `async` environment, of whose one worker as many calls wait at a time as episodes are under way.

    It plays them bit for bit as the plain one does, log-probs too. Control: with one call more to wait for than there
    are, all episodes that began time out.
    """
    folder, ranks = watched.folder, watched.ranks
    _build(ranks, folder)
    plain = ranks.ask("generate", **_request(folder, table))[0]
    settings = {"turns": 3, "together": 12}
    environment = {**ENVIRONMENT, "type": "tests.engines.playground:Gathering", "settings": settings, "workers": 1}
    _build(ranks, folder, environment)
    together = ranks.ask("generate", **_request(folder, table))[0]
    for one, other in zip(_arrays(plain), _arrays(together), strict=True):
        np.testing.assert_array_equal(one, other)
    texts = [re.sub(r"playground.py:\d+", "", repr(_as_text([reply]))) for reply in (plain, together)]
    assert texts[0] == texts[1], "but for the line that raises"
    settings["together"] = 13
    _build(ranks, folder, {**environment, "timeout_s": 0.5})
    alone = _episodes(ranks.ask("generate", **_request(folder, table))).values()
    assert [episode.failure for episode in alone][:12] == ["timed out after 0.5 s"] * 12


def _arrays(reply: EngineResponses) -> list[np.ndarray]:
    """Return what has to be the same bit for bit."""
    tokens, played = reply.responses, reply.episodes
    assert played is not None
    assert reply.logprobs_T is not None
    own = [tokens.values_T, tokens.offsets_B1, reply.logprobs_T, reply.positions_P]
    return [*own, played.loss_mask_T, played.turns_B, played.rewards_B]


def _as_text(replies: list[EngineResponses]) -> dict[tuple[int, int], str]:
    """Episodes that can be compared: a reward that was not given is NaN, which is not equal to itself."""
    return {name: repr(episode) for name, episode in _episodes(replies).items()}


# ---- without an engine ---------------------------------------------------------------------------------------------


def test_a_text_that_ends_a_turn_has_to_be_a_token(folder_of: FolderOf) -> None:
    """A character is, and every token that contains it ends the turn; two characters and unknown ones are not."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of(SHAPE))
    assert stop_tokens(tokenizer, ()) == []
    found = stop_tokens(tokenizer, ("u",))
    assert tokenizer("u")["input_ids"][0] in found
    assert tokenizer.convert_tokens_to_ids("<unused-1>") in found, "its text has the letter, too"
    assert tokenizer("v")["input_ids"][0] not in found
    for text in ("ab", "é", "Z"):
        with pytest.raises(UserError, match="no single token"):
            stop_tokens(tokenizer, (text,))


def test_seeds_of_turns_are_distinct() -> None:
    """Over prompts, samples, turns and generations; vLLM keeps them as signed numbers."""
    seeds = {
        turn_seed(generation, position, sample, turn)
        for generation in ([0, 1, 0], [0, 1, 1], [0, 2, 0], [1, 1, 0])
        for position in range(20)
        for sample in range(4)
        for turn in range(4)
    }
    assert len(seeds) == 4 * 20 * 4 * 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)
