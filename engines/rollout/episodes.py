"""A generation of episodes: policy and environment take turns, and vLLM never waits for an environment.

A turn is one request of the decode loop. It ends at a stop token, or at its limit; its tokens stay exactly as they
were sampled. The environment gets their text, its observation is tokenised by itself and put behind them, and all
tokens so far are the prompt of the next turn, which vLLM's prefix cache knows already. Text never becomes tokens a
second time, so what the trainer sees is what the policy saw and sampled; the mask says which tokens it sampled.

Many episodes are under way. Environments answer in processes of their own (penstock/environments/pool.py); the loop
asks after each step of vLLM what has come. With `in_step` it waits for all answers first: then no timing has a part in
which sequences are computed together, and a repeated generation is the same to the last bit.

Suffixes: `_P` prompts, `_B` episodes (of a prompt side by side), `_T` tokens of all episodes.
Left out: stepping vLLM (engines/rollout/decode_loop.py), single responses (engines/rollout/responses.py), what an
environment is (penstock/environments/environment.py).
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.sections.rollout import EnvironmentConfig
from engines.rollout.decode_loop import DecodeLoop, Request, Share
from engines.rollout.detokenize import decode
from engines.rollout.responses import Generated
from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.data.prompts import PromptTable
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call, Reply


@dataclass(frozen=True)
class Environments:
    """Who plays with the policy, and by which rules."""

    pool: EnvironmentPool
    rows_P: Sequence[Mapping[str, Any]]  # the data row of every prompt
    tokenizer: Any
    stop_tokens: list[int]  # that end a turn, besides the model's own
    max_turns: int


@dataclass(frozen=True)
class Played(Generated):
    """What one engine played: `samples` episodes side by side for each of its prompts."""

    mask_T: np.ndarray  # 1 for the tokens that the policy sampled, 0 for observations
    turns_B: np.ndarray
    replies: list[Reply]  # of each episode: its rewards added up, its failure
    waited_seconds: float  # in which vLLM stood still because environments had not answered


def turn_seed(seed: Sequence[int], position: int, sample: int, turn: int) -> int:
    """Return the seed of a turn, 63 bits; turn 0 is the environment's `reset`."""
    return int(np.random.SeedSequence([*seed, position, sample, turn]).generate_state(1, np.uint64)[0]) >> 1


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    """Return the tokens that end a turn: all whose text contains one of `stop`.

    Raises:
        UserError: a text is no single token.
    """
    if not stop:
        return []
    found = set()
    for text in stop:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            raise UserError(
                f"the environment ends turns at {text!r}, which is no single token of the model",
                "end a turn at a character or token that the tokenizer has, or let the model end it by end-of-sequence",
            )
        found.add(tokens[0])
    count = len(tokenizer)
    texts = decode(tokenizer, Ragged(np.arange(count), np.arange(count + 1)))
    return sorted(found | {token for token, text in enumerate(texts) if any(part in text for part in stop)})


@dataclass(slots=True)
class _Episode:
    row: int  # among the episodes of its engine
    name: str
    position: int
    sample: int
    prompt: list[int]
    first_version: int  # the policy version of the first turn's first token; without a turn, that of the beginning
    last_version: int
    began: float
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    truncated: bool = False  # by the limit of tokens or of turns
    rewards: list[Reply] = field(default_factory=list)
    failure: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


class EpisodeLoop:
    """Plays a share's episodes until each of them has ended; a turn is a request of the decode loop.

    Args:
        share: its `sampling.max_tokens` bounds all tokens of an episode, observations included.
        in_step: wait for all environments before each step of vLLM.
    """

    def __init__(self, share: Share, environments: Environments, in_step: bool) -> None:
        self._share, self._environments, self._in_step = share, environments, in_step
        self._episodes: list[_Episode] = []
        self._live: dict[str, _Episode] = {}
        self._untaken: deque[int] = deque()  # prompts taken from the queue whose episodes have not begun
        self._asked = 0  # calls that environments have not answered
        self._waited_seconds = 0.0
        self._began = time.perf_counter()
        self._seconds = 0.0

    @property
    def ended(self) -> bool:
        """Whether every episode of the share has ended."""
        return not self._live and not self._untaken and self._share.queue.exhausted

    def feed(self, loop: DecodeLoop) -> None:
        """Begin episodes that there is room for, and hand in the turns whose environments have answered."""
        share, samples = self._share, self._share.sampling.samples
        if not self._untaken and not share.queue.exhausted and self._has_room(loop):
            self._untaken.extend(share.queue.take(max(1, (share.room - len(self._live)) // samples)))
        while self._untaken and self._has_room(loop):
            self._begin(self._untaken.popleft(), loop.version)
        for name, reply in self._replies(loop):
            self._answered(loop, self._live[name], reply)

    def collect(self, ended: list[Request]) -> None:
        """Let the environments answer the turns that have ended."""
        self._seconds = time.perf_counter() - self._began
        if not ended:
            return
        episodes = [self._episodes[request.row] for request in ended]
        for episode, request in zip(episodes, ended, strict=True):
            episode.tokens += request.tokens
            episode.mask += [1] * len(request.tokens)
            episode.logprobs += request.logprobs
            episode.cached_tokens += request.cached
            episode.truncated = request.truncated
            episode.last_version = request.last_version
            if episode.turns == 1:
                episode.first_version = request.first_version
        texts = decode(self._environments.tokenizer, Ragged.of([request.tokens for request in ended], np.int32))
        self._ask(
            [
                Call(episode.name, text=text, last=self._is_last(episode))
                for episode, text in zip(episodes, texts, strict=True)
            ]
        )

    def generated(self) -> Played:
        """Return all that was played, once every episode has ended."""
        self._environments.pool.forget()
        episodes = self._episodes
        tokens = Ragged.of([episode.tokens for episode in episodes], np.int32)
        logprobs = Ragged.of([episode.logprobs for episode in episodes], np.float32).values_T
        return Played(
            positions_P=np.asarray([episode.position for episode in episodes if episode.sample == 0], np.int64),
            responses=tokens,
            logprobs_T=logprobs if self._share.sampling.logprobs else None,
            truncated_B=np.asarray([episode.truncated for episode in episodes], bool),
            first_version_B=np.asarray([episode.first_version for episode in episodes], np.int64),
            last_version_B=np.asarray([episode.last_version for episode in episodes], np.int64),
            seconds_B=np.asarray([episode.seconds for episode in episodes], np.float32),
            prompt_tokens=sum(episode.prompt_tokens for episode in episodes),
            cached_tokens=sum(episode.cached_tokens for episode in episodes),
            seconds=self._seconds,
            mask_T=Ragged.of([episode.mask for episode in episodes], np.uint8).values_T,
            turns_B=np.asarray([episode.turns for episode in episodes], np.int64),
            replies=[_total(episode) for episode in episodes],
            waited_seconds=self._waited_seconds,
        )

    # ---- the environments' turn ----------------------------------------------------------------------------------

    def _has_room(self, loop: DecodeLoop) -> bool:
        return loop.has_room(len(self._live), self._share.sampling.samples, self._share.room)

    def _begin(self, position: int, version: int) -> None:
        """Begin the episodes of a prompt."""
        share, row = self._share, dict(self._environments.rows_P[position])
        prompt = share.prompts.row(position).tolist()
        calls = []
        for sample in range(share.sampling.samples):
            name = f"{share.number}-{position}-{sample}"
            place = (len(self._episodes), name, position, sample)
            episode = _Episode(*place, prompt, version, version, time.perf_counter())
            self._episodes.append(episode)
            self._live[name] = episode
            calls.append(Call(name, row=row, seed=turn_seed(share.sampling.seed, position, sample, 0)))
        self._ask(calls)

    def _ask(self, calls: list[Call]) -> None:
        self._asked += len(calls)
        self._environments.pool.ask(calls)

    def _replies(self, loop: DecodeLoop) -> list[tuple[str, Reply]]:
        """Return what environments have answered by an episode's name; wait only if there is nothing else to do."""
        begin = time.perf_counter()
        replies = self._environments.pool.replies(self._to_wait_for(loop))
        self._waited_seconds += time.perf_counter() - begin
        self._asked -= len(replies)
        return [(name, replies[name]) for name in (sorted(replies) if self._in_step else replies)]

    def _to_wait_for(self, loop: DecodeLoop) -> int:
        """Return how many answers have to be there: all in step, else one where no token is decoded meanwhile."""
        if self._in_step:
            return self._asked
        if loop.decoding:
            return 0
        return min(1, self._asked)

    # ---- the policy's turn ---------------------------------------------------------------------------------------

    def _answered(self, loop: DecodeLoop, episode: _Episode, reply: Reply) -> None:
        """Put the observation behind the tokens and let the policy take its next turn, or end the episode."""
        episode.failure = reply.failure
        if reply.reward is not None:
            episode.rewards.append(reply)
        if reply.failure is None and not reply.done and self._goes_on(episode, reply):
            self._next_turn(loop, episode)
            return
        episode.seconds = time.perf_counter() - episode.began
        del self._live[episode.name]

    def _is_last(self, episode: _Episode) -> bool:
        return episode.truncated or episode.turns == self._environments.max_turns

    def _goes_on(self, episode: _Episode, reply: Reply) -> bool:
        """Take in the observation, if another turn is allowed and at least one token of it has room."""
        observed = self._tokens(reply.observation)
        if self._is_last(episode) or len(episode.tokens) + len(observed) >= self._share.sampling.max_tokens:
            episode.truncated = True
            if not episode.turns:
                episode.failure = f"the first observation has {len(observed)} tokens and leaves no room for a turn"
            return False
        episode.tokens += observed
        episode.mask += [0] * len(observed)
        if self._share.sampling.logprobs:
            episode.logprobs += [0.0] * len(observed)
        return True

    def _tokens(self, observation: str | None) -> list[int]:
        if not observation:
            return []
        tokens: list[int] = self._environments.tokenizer(observation, add_special_tokens=False)["input_ids"]
        return tokens

    def _next_turn(self, loop: DecodeLoop, episode: _Episode) -> None:
        share = self._share
        episode.turns += 1
        parameters = copy.copy(share.parameters)
        parameters.max_tokens = share.sampling.max_tokens - len(episode.tokens)
        seeds = None
        if share.own_streams:
            seeds = [turn_seed(share.sampling.seed, episode.position, episode.sample, episode.turns)]
        prompt = episode.prompt + episode.tokens
        episode.prompt_tokens += len(prompt)
        loop.request(self, {f"{episode.name}-{episode.turns}": episode.row}, prompt, parameters, seeds)


def _total(episode: _Episode) -> Reply:
    """Add up the rewards of an episode; a turn that gave no part of a name counts 0 for it."""
    parts: dict[str, float] = {}
    for reply in episode.rewards:
        for name, value in reply.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    reward = sum(float(reply.reward or 0.0) for reply in episode.rewards) if episode.rewards else None
    return Reply(reward=reward, parts=parts, failure=episode.failure)


@dataclass
class EnvironmentHost:
    """Starts the worker processes at the first generation; keeps the data rows of the prompts that it has seen."""

    pool: EnvironmentPool | None = None
    stop: list[int] = field(default_factory=list)
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def open(self, config: EnvironmentConfig, tokenizer: Any, table: str, prompt_ids: list[str]) -> Environments:
        """Return what plays with the policy from the given prompts of a prompt table.

        Raises:
            UserError: the environment does not load, or ends turns at what is no token.
        """
        if self.pool is None:
            self.pool = EnvironmentPool(config)
            self.stop = stop_tokens(tokenizer, self.pool.stop)
        if table not in self.rows:
            self.rows[table] = PromptTable.load(Path(table)).rows()
        rows = self.rows[table]
        return Environments(self.pool, [rows[name] for name in prompt_ids], tokenizer, self.stop, config.max_turns)

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()
