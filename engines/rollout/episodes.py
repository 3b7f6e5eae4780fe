"""The episode loop of a rollout engine: policy and environment take turns, and vLLM never waits for an environment.

A turn is one request. It ends at a stop token, or at its limit; its tokens stay exactly as they were drawn. The
environment gets their text, its observation is tokenised by itself and put behind them, and all tokens so far are the
prompt of the next turn, which vLLM's prefix cache knows already. Text never becomes tokens a second time, so what the
trainer sees is what the policy saw and drew; the mask says which tokens those are that it drew.

Many episodes are under way. Environments answer in processes of their own (penstock/environments/pool.py); the loop
asks after each step of vLLM what has come. With `in_step` it waits for all answers first: then no timing has a part in
which sequences are computed together, and a repeated generation is the same to the last bit.

Suffixes: `_P` prompts, `_B` episodes (of a prompt side by side), `_T` tokens of all episodes.
Left out: single responses (engines/rollout/decode_loop.py), what an environment is
(penstock/environments/environment.py).
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
from engines.commands.rollout import Sampling
from engines.rollout import vllm as versions
from engines.rollout.decode_loop import Generated, is_truncated
from engines.rollout.detokenize import decode
from engines.rollout.prompt_queue import Supply
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

    mask_T: np.ndarray  # 1 for the tokens that the policy drew, 0 for observations
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
    name: str
    position: int
    sample: int
    prompt: list[int]
    began: float
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    turn_begins: int = 0
    truncated: bool = False  # by the limit of tokens or of turns
    rewards: list[Reply] = field(default_factory=list)
    failure: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


def play(
    llm: Any,
    prompts: Ragged,
    supply: Supply,
    sampling: Sampling,
    parameters: Any,
    generation: int,
    room: int,
    *,
    environments: Environments,
    in_step: bool,
) -> Played:
    """Play `sampling.samples` episodes from each prompt until the supply is exhausted and every episode has ended.

    Args:
        sampling: its `max_tokens` bounds all tokens of an episode, observations included.
        parameters: as for `engines.rollout.decode_loop.answer`, like all arguments not named here.
        in_step: wait for all environments after each step of vLLM.

    Raises:
        RuntimeError: vLLM gave a request up.
    """
    loop = _Loop(llm, prompts, sampling, parameters, generation, environments, in_step)
    begin = time.perf_counter()
    waiting: deque[int] = deque()
    while loop.live or waiting or not supply.exhausted:
        if not waiting and not supply.exhausted and loop.has_room(room):
            waiting.extend(supply.take(max(1, (room - len(loop.live)) // sampling.samples)))
        while waiting and loop.has_room(room):
            loop.begin(waiting.popleft())
        loop.take_replies()
        if loop.running:
            loop.step()
    return loop.played(time.perf_counter() - begin)


class _Loop:
    """The state of one generation."""

    def __init__(
        self,
        llm: Any,
        prompts: Ragged,
        sampling: Sampling,
        parameters: Any,
        generation: int,
        environments: Environments,
        in_step: bool,
    ) -> None:
        self.llm, self.prompts, self.sampling, self.parameters = llm, prompts, sampling, parameters
        self.generation, self.environments, self.in_step = generation, environments, in_step
        self.episodes: list[_Episode] = []
        self.live: dict[str, _Episode] = {}
        self.running: dict[str, _Episode] = {}  # by the request's name
        self.asked = 0  # calls that environments have not answered
        self.waited_seconds = 0.0

    def has_room(self, room: int) -> bool:
        """Whether another prompt's episodes may begin."""
        if not self.live:
            return True
        return len(self.live) + self.sampling.samples <= room and not versions.waiting_sequences(self.llm)

    def begin(self, position: int) -> None:
        """Begin the episodes of a prompt."""
        prompt, row = self.prompts.row(position).tolist(), dict(self.environments.rows_P[position])
        calls = []
        for sample in range(self.sampling.samples):
            name = f"{self.generation}-{position}-{sample}"
            episode = _Episode(name, position, sample, prompt, time.perf_counter())
            self.episodes.append(episode)
            self.live[name] = episode
            calls.append(Call(name, row=row, seed=turn_seed(self.sampling.seed, position, sample, 0)))
        self._ask(calls)

    def take_replies(self) -> None:
        """Go on with the episodes whose environments have answered; wait only if there is nothing else to do."""
        wait_for = self.asked if self.in_step else min(1, self.asked) if not self.running else 0
        begin = time.perf_counter()
        replies = self.environments.pool.replies(wait_for)
        self.waited_seconds += time.perf_counter() - begin
        self.asked -= len(replies)
        for name in sorted(replies) if self.in_step else replies:
            self._answered(self.live[name], replies[name])

    def step(self) -> None:
        """Run one step of vLLM; turns that have ended go to their environments."""
        ended: list[_Episode] = []
        for output in versions.step(self.llm):
            episode = self.running[output.request_id]
            if len(episode.tokens) == episode.turn_begins:
                episode.cached_tokens += versions.cached_prompt_tokens(output)
            episode.tokens += output.new_token_ids
            episode.logprobs += versions.sampled_logprobs(output)
            if output.finish_reason is not None:
                del self.running[output.request_id]
                episode.truncated = is_truncated(output)
                ended.append(episode)
        if not ended:
            return
        for episode in ended:
            episode.mask += [1] * (len(episode.tokens) - episode.turn_begins)
        turns = Ragged.of([episode.tokens[episode.turn_begins :] for episode in ended], np.int32)
        texts = decode(self.environments.tokenizer, turns)
        self._ask(
            [
                Call(episode.name, text=text, last=self._is_last(episode))
                for episode, text in zip(ended, texts, strict=True)
            ]
        )

    def _ask(self, calls: list[Call]) -> None:
        self.asked += len(calls)
        self.environments.pool.ask(calls)

    def _is_last(self, episode: _Episode) -> bool:
        return episode.truncated or episode.turns == self.environments.max_turns

    def _answered(self, episode: _Episode, reply: Reply) -> None:
        """Put the observation behind the tokens and let the policy take its next turn, or end the episode."""
        episode.failure = reply.failure
        if reply.reward is not None:
            episode.rewards.append(reply)
        if reply.failure is not None or reply.done or not self._goes_on(episode, reply):
            episode.seconds = time.perf_counter() - episode.began
            del self.live[episode.name]
            return
        self._next_turn(episode)

    def _goes_on(self, episode: _Episode, reply: Reply) -> bool:
        """Take in the observation, if another turn is allowed and at least one token of it has room."""
        observed = self._tokens(reply.observation)
        if self._is_last(episode) or len(episode.tokens) + len(observed) >= self.sampling.max_tokens:
            episode.truncated = True
            if not episode.turns:
                episode.failure = f"the first observation has {len(observed)} tokens and leaves no room for a turn"
            return False
        episode.tokens += observed
        episode.mask += [0] * len(observed)
        if self.sampling.logprobs:
            episode.logprobs += [0.0] * len(observed)
        return True

    def _tokens(self, observation: str | None) -> list[int]:
        if not observation:
            return []
        tokens: list[int] = self.environments.tokenizer(observation, add_special_tokens=False)["input_ids"]
        return tokens

    def _next_turn(self, episode: _Episode) -> None:
        episode.turns += 1
        episode.turn_begins = len(episode.tokens)
        parameters = copy.copy(self.parameters)
        parameters.max_tokens = self.sampling.max_tokens - len(episode.tokens)
        seeds = None
        if self.parameters.seed is not None:
            seeds = [turn_seed(self.sampling.seed, episode.position, episode.sample, episode.turns)]
        request, prompt = f"{episode.name}-{episode.turns}", episode.prompt + episode.tokens
        episode.prompt_tokens += len(prompt)
        self.running[request] = episode
        versions.submit(self.llm, [request], prompt, parameters, seeds)

    def played(self, seconds: float) -> Played:
        """Return all that was played, once every episode has ended."""
        self.environments.pool.forget()
        episodes = self.episodes
        tokens = Ragged.of([episode.tokens for episode in episodes], np.int32)
        logprobs = Ragged.of([episode.logprobs for episode in episodes], np.float32).values_T
        return Played(
            positions_P=np.asarray([episode.position for episode in episodes if episode.sample == 0], np.int64),
            responses=tokens,
            logprobs_T=logprobs if self.sampling.logprobs else None,
            truncated_B=np.asarray([episode.truncated for episode in episodes], bool),
            seconds_B=np.asarray([episode.seconds for episode in episodes], np.float32),
            prompt_tokens=sum(episode.prompt_tokens for episode in episodes),
            cached_tokens=sum(episode.cached_tokens for episode in episodes),
            seconds=seconds,
            mask_T=Ragged.of([episode.mask for episode in episodes], np.uint8).values_T,
            turns_B=np.asarray([episode.turns for episode in episodes], np.int64),
            replies=[_total(episode) for episode in episodes],
            waited_seconds=self.waited_seconds,
        )


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
