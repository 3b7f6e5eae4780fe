"""One episode: its tokens and who they are from, and how far its environment is; and how it is carried over.

What an environment knows of an episode is the seed of its `reset` and the texts of its turns. So one that a new engine
does not have is played again from these. Each of its answers has to be what the policy has read.

Suffixes: `_B` episodes, `_T` tokens of all episodes.
Left out: who plays (penstock/engines/rollout/episodes.py), when a generation leaves episodes
(penstock/engines/rollout/quota.py), where they wait (penstock/session/rollout/carried.py).
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import NO_SEED, Asked, CarriedEpisodes, CarriedResponses
from penstock.engines.rollout.carried import homes_of_unended, spans_of, versions_of
from penstock.engines.rollout.decode_loop import Generation, Request
from penstock.environments.gateway.asks import Ask
from penstock.environments.worker import Reply


@dataclass(slots=True)
class Placed:
    """Turns that follow the same tokens: one, or as many as an agent wants to choose from.

    Attributes:
        ask: what the agent asked; None: an environment answers each turn.
        aside: the tokens of a request from which nothing is learnt; None: those of the first turn's path.
        refused: why none is drawn.
        limited: whether they may be shorter than there is room for: the agent asked for that, or others share it.
        paths: by number those that are learnt from, each with the path that it goes on with.
        names: by number what the agent's requests call these, where there are several paths.
        room: for the tokens of each; 0 before they are drawn.
        begun: what an earlier generation has left of those that have not ended, by number.
        drawn: what has ended, by number.
    """

    ask: Ask | None = None
    aside: list[int] | None = None
    refused: str | None = None
    limited: bool = False
    paths: dict[int, Episode] = field(default_factory=dict)
    names: dict[int, int] = field(default_factory=dict)
    room: int = 0
    begun: dict[int, Request] = field(default_factory=dict)
    drawn: dict[int, Request] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """How many turns are drawn."""
        return 0 if self.refused is not None else 1 if self.ask is None else self.ask.choices

    @property
    def prompt(self) -> list[int]:
        """The tokens that they follow, those that have ended left out."""
        if self.aside is not None:
            return self.aside
        path, ended = self.paths[0], self.drawn.get(0)
        return path.until(len(path.tokens) - (0 if ended is None else len(ended.tokens)))

    @property
    def begun_by(self) -> int | None:
        """The policy version that sampled the first token of the path that they follow; None: there is none yet."""
        return None if self.aside is not None else self.paths[0].first_version


NOBODY: Any = None  # owns a request that waits for another generation


@dataclass(slots=True)
class Episode:
    """An episode. One of several paths is the first of them, and has the others.

    Attributes:
        row: its number among the episodes of its engine.
        seed: of the environment's `reset`; the episode is known by it.
        version: the policy version when it began.
        mask: 1 for tokens that the policy sampled, 0 for observations.
        versions: the policy version that sampled each token; of an observation, the one that there was when it came.
        turn_ends: how many tokens there were at the end of each turn.
        owed: the environment has not answered the last turn, or `reset`.
        turns: that have begun.
        truncated: by the limit of tokens or of turns.
        earned: its rewards and their parts, added up, and its failure.
        replayed: answers of an environment that is played again; None: it is as far as the episode.
        round: the turns that are drawn next, or now; an agent may ask for several at once.
        drawing: of those, how many have not ended.
        asides: how often each prompt was drawn from beside the conversation.
        unbridged: turns that were taken aside, and are not learnt from.
        branches: its other paths, of which the tokens alone count.
        own: of a path's prompt, the tokens that no path before it has.
        numbered: turns of all paths by the numbers that requests call them, and how long their paths were at their end.
        in_vain: how often its agent asked and nothing was drawn.
        seconds: from the beginning in this generation to the end.
    """

    row: int
    position: int
    sample: int
    prompt: list[int]
    seed: int
    version: int
    began: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    owed: bool = True
    turns: int = 0
    truncated: bool = False
    earned: Reply = field(default_factory=Reply)
    replayed: int | None = None
    round: list[Placed] = field(default_factory=list)
    drawing: int = 0
    asides: Counter[bytes] = field(default_factory=Counter)
    unbridged: int = 0
    branches: list[Episode] = field(default_factory=list)
    own: int = 0
    numbered: dict[int, tuple[Episode, int]] = field(default_factory=dict)
    in_vain: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What environments know it by."""
        return str(self.seed)

    @property
    def policys_versions(self) -> tuple[int, int]:
        """The policy versions of its first and its last token that the policy sampled; without any, the beginning's."""
        mask, versions = (self.joined(of) for of in ("mask", "versions"))
        if not any(mask):
            return self.version, self.version
        return versions[mask.index(1)], versions[-1 - mask[::-1].index(1)]

    @property
    def first_version(self) -> int | None:
        """The policy version of the first token in this path that the policy sampled; None: there is none yet."""
        return self.versions[self.mask.index(1)] if 1 in self.mask else None

    @property
    def drawn(self) -> int:
        """Turns that have ended, those beside the conversation included."""
        return sum(len(path.turn_ends) for path in self.paths) + self.unbridged

    @property
    def paths(self) -> list[Episode]:
        """Its conversations, of which it is the first; those without a turn are left out."""
        return [self, *(path for path in self.branches if path.turn_ends)]

    @property
    def size(self) -> int:
        """Tokens behind the prompt; what paths have in common counts once."""
        return len(self.tokens) + sum(path.own + len(path.tokens) for path in self.branches)

    def joined(self, of: str) -> list[Any]:
        """Return a list of an entry for each token, of all paths one after the other."""
        known: list[Any] = getattr(self, of)
        return [entry for path in self.paths for entry in getattr(path, of)] if self.branches else known

    @property
    def joined_turn_ends(self) -> list[int]:
        """How many tokens there were at the end of each turn, of all paths one after the other."""
        if not self.branches:
            return self.turn_ends
        before = np.cumsum([0, *(len(path.tokens) for path in self.paths)]).tolist()
        return [first + end for first, path in zip(before, self.paths, strict=False) for end in path.turn_ends]

    def until(self, end: int) -> list[int]:
        """Return the prompt, and the first tokens behind it."""
        return self.prompt + self.tokens[:end]

    def taken(self, placed: Placed, choice: int, request: Request) -> None:
        """Take in a turn that has ended."""
        placed.drawn[choice] = request
        if (path := placed.paths.get(choice)) is None:
            self.unbridged += 1
        else:
            path.sampled(request)
            path.turn_ends.append(len(path.tokens))
            self.truncated |= request.truncated and not placed.limited
            if choice in placed.names:
                self.numbered[placed.names[choice]] = path, len(path.tokens)
        self.cached_tokens += request.cached
        self.drawing -= 1
        self.owed = not self.drawing

    def sampled(self, request: Request) -> None:
        """Put what the policy has sampled behind the tokens."""
        self.tokens += request.tokens
        self.mask += [1] * len(request.tokens)
        self.logprobs += request.logprobs
        self.versions += versions_of([request]).tolist()

    def left(self, placed: Placed, choice: int, request: Request) -> None:
        """Keep what there is of an agent's turn that has not ended."""
        self.drawing -= 1
        if request.tokens:
            placed.begun[choice] = request

    def moved(self, row: int, position: int, sample: int) -> None:
        """Be an episode of another generation."""
        self.row, self.position, self.sample = row, position, sample
        self.began, self.prompt_tokens, self.cached_tokens = time.perf_counter(), 0, 0

    def rest(self) -> None:
        """Wait for another generation: the requests that wait with it let go of the one that has ended."""
        for placed in self.round:
            for request in (*placed.begun.values(), *placed.drawn.values()):
                request.owner = NOBODY

    def with_begun(self) -> Episode:
        """Return the episode with what there is of a turn that has not ended, as if an environment played it."""
        begun = [placed.begun[0] for placed in self.round if 0 in placed.begun and placed.paths.get(0) is self]
        if not begun:
            return self
        whole = replace(
            self, tokens=self.tokens[:], mask=self.mask[:], logprobs=self.logprobs[:], versions=self.versions[:]
        )
        whole.sampled(begun[0])
        return whole

    def observed(self, tokens: list[int], version: int) -> None:
        """Put an observation behind the tokens."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [version] * len(tokens)

    def earn(self, reply: Reply) -> None:
        """Add the reward of a turn, if it gave one; a turn that gave no part of a name counts 0 for it."""
        reward, parts = self.earned.reward, dict(self.earned.parts)
        if reply.reward is not None:
            reward = (reward or 0.0) + float(reply.reward)
        for name, value in reply.parts.items():
            parts[name] = parts.get(name, 0.0) + value
        self.earned = Reply(reward=reward, parts=parts, failure=reply.failure)

    def observation(self, turn: int) -> list[int]:
        """Return the tokens of the answer to a turn, from 1 on; 0: to `reset`."""
        first = end = self.turn_ends[turn - 1] if turn else 0
        while end < len(self.tokens) and not self.mask[end]:
            end += 1
        return self.tokens[first:end]

    def turn(self, number: int) -> list[int]:
        """Return the tokens of a turn that has ended, from 1 on."""
        before = self.turn_ends[number - 2] if number > 1 else 0
        return self.tokens[before + len(self.observation(number - 1)) : self.turn_ends[number - 1]]

    def restore(self, carried: CarriedResponses, number: int) -> None:
        """Be as carried response `number`, which has begun; one of several paths is never carried."""
        played = carried.episodes
        assert played is not None
        first, end = carried.tokens.offsets_B1[number : number + 2]
        self.seed, self.owed = int(played.seeds_B[number]), bool(played.owed_B[number])
        self.tokens, self.mask = carried.tokens.row(number).tolist(), played.loss_mask_T[first:end].tolist()
        self.logprobs, self.versions = carried.logprobs_T[first:end].tolist(), carried.versions_T[first:end].tolist()
        self.turn_ends = played.turn_ends.row(number).tolist()
        self.truncated = bool(carried.truncated_B[number])
        if played.asked is not None:
            self.prompt = played.asked.prompts.row(number).tolist()
            self.unbridged = int(played.asked.unbridged_B[number])
        self.turns = self.drawn
        reward = float(played.rewards_B[number])
        earned = None if np.isnan(reward) else reward
        self.earned = Reply(reward=earned, parts=played.parts_B[number], failure=played.failures_B[number])


def begun_turn(episode: Episode, owner: Generation) -> Placed:
    """Take what there is of a turn that has not ended off an episode's tokens; return it as a turn to go on with."""
    ended = episode.turn_ends[-1] if episode.turn_ends else 0
    first = ended + len(episode.observation(len(episode.turn_ends)))
    placed = Placed(paths={0: episode})
    if first < len(episode.tokens):
        versions, asked_for = episode.versions[first:], len(episode.logprobs) == len(episode.tokens)
        placed.begun[0] = Request(
            owner,
            0,
            0.0,
            tokens=array("i", episode.tokens[first:]),
            logprobs=episode.logprobs[first:] if asked_for else [],
            versions=spans_of(versions),
        )
        for kept in (episode.tokens, episode.mask, episode.logprobs, episode.versions):
            del kept[first:]
    return placed


def known_of(episode: Episode) -> str:
    """Return a digest of all that an engine knows of an agent's episode that goes on: one of a single path."""
    digest = hashlib.sha256()
    _put(digest, episode.prompt, episode.tokens, episode.versions, episode.turn_ends)
    for placed in () if episode.owed else episode.round:
        digest.update(repr(placed.refused).encode())
        _put(digest, [-1] if placed.aside is None else placed.aside)
        for turns in (placed.begun, placed.drawn):
            for choice, turn in sorted(turns.items()):
                _put(digest, [choice], turn.tokens, [number for span in turn.versions for number in span])
    for followed, times in sorted(episode.asides.items()):
        digest.update(followed)
        _put(digest, [times])
    _put(digest, [episode.owed, episode.truncated, episode.unbridged, episode.in_vain])
    return digest.hexdigest()


def _put(digest: Any, *lists: Sequence[int]) -> None:
    """Let a digest be of some more lists, each with its length before it."""
    for numbers in lists:
        digest.update(len(numbers).to_bytes(8))
        digest.update(np.asarray(numbers, np.int64).tobytes())


def heard(tokens: Sequence[int], turn_ends: Sequence[int]) -> str:
    """Return a digest of what an environment was told of an episode, and answered."""
    digest = hashlib.sha256()
    _put(digest, turn_ends, tokens[: turn_ends[-1]] if len(turn_ends) else [])
    return digest.hexdigest()


def under_way(carried: CarriedResponses | None) -> dict[int, str]:
    """Return the seeds of carried episodes that have begun and not ended, and a digest of how far each is.

    Of an environment it is what that has heard, since a turn under way is carried; of an agent all that is known.
    """
    if carried is None or carried.episodes is None:
        return {}
    seeds_B, ends, known_B = carried.episodes.seeds_B, carried.episodes.turn_ends, carried.episodes.known_B
    rows = np.flatnonzero((seeds_B != NO_SEED) & ~carried.ended_B).tolist()
    if known_B is not None:
        return {int(seeds_B[row]): known_B[row] for row in rows}
    return {int(seeds_B[row]): heard(carried.tokens.row(row).tolist(), ends.row(row).tolist()) for row in rows}


def carried_episodes(
    episodes: Sequence[Episode],
    ended: Sequence[bool],
    logprobs: bool,
    engine: int,
    asked: Asked | None = None,
    known: Mapping[int, str] | None = None,
) -> CarriedResponses:
    """Return what there is of episodes, for a later generation to go on with.

    Args:
        logprobs: whether they were asked for.
        engine: that has those which have not ended.
        asked: what agents bring.
        known: of agents' episodes that have not ended, by seed what `known_of` says.
    """
    known_B = None if not known else [known.get(episode.seed, "") for episode in episodes]
    if asked is not None and asked.paths is None:
        episodes = [episode.with_begun() for episode in episodes]
    kept = [episode.joined("logprobs") for episode in episodes] if logprobs else []
    rewards = [np.nan if episode.earned.reward is None else episode.earned.reward for episode in episodes]
    return CarriedResponses(
        tokens=Ragged.of([episode.joined("tokens") for episode in episodes], np.int32),
        logprobs_T=Ragged.of(kept, np.float32).values_T,
        versions_T=Ragged.of([episode.joined("versions") for episode in episodes], np.int32).values_T,
        ended_B=np.asarray(ended, bool),
        truncated_B=np.asarray([episode.truncated for episode in episodes], bool),
        episodes=CarriedEpisodes(
            seeds_B=np.asarray([episode.seed for episode in episodes], np.int64),
            loss_mask_T=Ragged.of([episode.joined("mask") for episode in episodes], np.uint8).values_T,
            turn_ends=Ragged.of([episode.joined_turn_ends for episode in episodes], np.int32),
            owed_B=np.asarray([episode.owed for episode in episodes], bool),
            rewards_B=np.asarray(rewards, np.float64),
            parts_B=[episode.earned.parts for episode in episodes],
            failures_B=[episode.earned.failure for episode in episodes],
            asked=asked,
            known_B=known_B,
        ),
        engines_B=homes_of_unended(ended, engine),
    )
