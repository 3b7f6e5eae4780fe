"""A generation of games: the policy plays all agents, each in a conversation of its own.

A game is an environment that names who has the turn and what that agent sees. What an agent is shown first is its
prompt; what it is shown later is put behind the turns that it has taken, whose tokens stay as they were sampled
(penstock/engines/rollout/agents.py). So one game makes as many sequences as it has agents, and what an agent has not
seen is not among its tokens. The reply has them by prompt, agent and sample: samples of a prompt and an agent are
neighbours.

Suffixes: `_P` prompts, `_B` conversations, `_T` tokens of all of them.
Left out: episodes of one conversation (penstock/engines/rollout/episodes.py), carrying games over, quotas.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.rollout.agents import NotServed
from penstock.engines.rollout.decode_loop import DecodeLoop, Request, Share
from penstock.engines.rollout.detokenize import decode
from penstock.engines.rollout.environments.host import Environments, Players
from penstock.engines.rollout.episode import Episode
from penstock.engines.rollout.episodes import Played, asked_of, turn_seed
from penstock.environments.gateway.asks import Ask
from penstock.environments.pool import Asking
from penstock.environments.worker import Call, Reply

NOT_FOLLOWED = "the turn before did not end with the chat template's own token, so what it is shown cannot follow"


@dataclass(slots=True)
class Game:
    """A game under way.

    Attributes:
        number: its place among the games of its engine.
        seats: the conversation of each agent.
        seat: which of them has the turn.
        turns: of all agents, that have begun.
        cut: whether the last turn was the last that is allowed.
    """

    number: int
    seed: int
    seats: list[Episode]
    seat: int = 0
    turns: int = 0
    cut: bool = False

    @property
    def name(self) -> str:
        """What its environment knows it by."""
        return str(self.seed)

    @property
    def speaker(self) -> Episode:
        """The conversation of the agent that has the turn."""
        return self.seats[self.seat]

    @property
    def place(self) -> str:
        """Its prompt and its sample."""
        return f"{self.seats[0].position}-{self.seats[0].sample}"


class GameLoop:
    """Plays a share's games until each of them has ended; a turn is a request of the decode loop.

    Args:
        share: its `sampling.max_tokens` bounds the tokens of each agent behind its prompt, observations included.
        players: the agents.
        in_step: wait for all games before each step of vLLM.
    """

    def __init__(self, share: Share, environments: Environments, players: Players, in_step: bool) -> None:
        self._share, self._environments, self._players, self._in_step = share, environments, players, in_step
        self._games: list[Game] = []
        self._live: dict[str, Game] = {}
        self._untaken: deque[int] = deque()  # prompts taken from the queue whose games have not begun
        self._asking = Asking(environments.pool, in_step)
        self._ready: list[Game] = []  # whose next turn may begin
        self._given_up = 0
        self._began = time.perf_counter()
        self._seconds = 0.0

    @property
    def ended(self) -> bool:
        """Whether every game of the share has ended."""
        return not (self._live or self._untaken or not self._share.queue.exhausted)

    def feed(self, loop: DecodeLoop) -> None:
        """Begin games that there is room for, and hand in the turns that have been given."""
        share, samples = self._share, self._share.sampling.samples
        if not self._untaken and not share.queue.exhausted and self._has_room(loop):
            self._untaken.extend(share.queue.take(max(1, (share.room - len(self._live)) // samples)))
        while self._untaken and self._has_room(loop):
            self._begin(self._untaken.popleft(), loop.version)
        self._hear(loop)
        ready, self._ready = self._ready, []
        for game in sorted(ready, key=_place) if self._in_step else ready:
            self._next_turn(loop, game)

    def collect(self, ended: list[Request]) -> None:
        """Tell the games the turns that have ended."""
        self._seconds = time.perf_counter() - self._began
        if not ended:
            return
        texts = decode(self._environments.tokenizer, Ragged.of([request.tokens for request in ended], np.int32))
        for request, text in zip(ended, texts, strict=True):
            game = self._games[request.row]
            speaker = game.speaker
            speaker.sampled(request)
            speaker.turn_ends.append(len(speaker.tokens))
            speaker.cached_tokens += request.cached
            speaker.truncated = request.truncated
            game.cut = request.truncated or game.turns == self._environments.max_turns
            self._asking.ask(Call(game.name, text=text, last=game.cut))
        self._asking.send()

    def give_up(self, requests: list[Request], tokens: int) -> None:
        """Remember how much was sampled in vain."""
        self._given_up = tokens

    def generated(self) -> Played:
        """Return the conversations, once all games have ended."""
        seats = [*self._in_order()]
        versions = [seat.policys_versions for seat in seats]
        samples, logprobs = self._share.sampling.samples, [seat.logprobs for seat in seats]
        return Played(
            positions_P=np.asarray([game.seats[0].position for game in self._games[::samples]], np.int64),
            rows_B=np.arange(len(seats)),
            responses=Ragged.of([seat.tokens for seat in seats], np.int32),
            logprobs_T=Ragged.of(logprobs, np.float32).values_T if self._share.sampling.logprobs else None,
            truncated_B=np.asarray([seat.truncated for seat in seats], bool),
            first_version_B=np.asarray([first for first, _ in versions], np.int64),
            last_version_B=np.asarray([last for _, last in versions], np.int64),
            seconds_B=np.asarray([seat.seconds for seat in seats], np.float32),
            prompt_tokens=sum(seat.prompt_tokens for seat in seats),
            cached_tokens=sum(seat.cached_tokens for seat in seats),
            seconds=self._seconds,
            unused_tokens=self._given_up,
            versions_T=None,
            left=None,
            routes=None,
            mask_T=Ragged.of([seat.mask for seat in seats], np.uint8).values_T,
            turns_B=np.asarray([seat.turns for seat in seats], np.int64),
            replies=[seat.earned for seat in seats],
            waited_seconds=self._asking.waited_seconds,
            asked=asked_of(seats, self._environments.tokenizer),
        )

    def _in_order(self) -> Iterator[Episode]:
        samples = self._share.sampling.samples
        for first in range(0, len(self._games), samples):
            for seat in range(len(self._players.names)):
                yield from (game.seats[seat] for game in self._games[first : first + samples])

    # ---- the game's turn -----------------------------------------------------------------------------------------

    def _has_room(self, loop: DecodeLoop) -> bool:
        return loop.has_room(len(self._live), self._share.sampling.samples, self._share.room)

    def _begin(self, position: int, version: int) -> None:
        share = self._share
        prompt, row = share.prompts.row(position).tolist(), dict(self._environments.rows_P[position])
        for sample in range(share.sampling.samples):
            number, seed = len(self._games), turn_seed(share.sampling.seed, position, sample, 0)
            seats = [Episode(number, position, sample, prompt, seed, version) for _ in self._players.names]
            game = Game(number, seed, seats)
            self._games.append(game)
            self._live[game.name] = game
            self._asking.ask(Call(game.name, row=row, seed=seed))

    def _hear(self, loop: DecodeLoop) -> None:
        """Take in what games have answered; wait only if there is nothing else to do."""
        for name, reply in self._asking.hear(busy=bool(loop.decoding or self._ready)).items():
            self._answered(self._live[name], reply, loop.version)

    def _answered(self, game: Game, reply: Reply, version: int) -> None:
        """Pay the agents, and give the turn to the next or end the game."""
        for name, seat in zip(self._players.names, game.seats, strict=True):
            if name in reply.rewards:
                reward, parts = reply.rewards[name]
                seat.earn(Reply(reward=reward, parts=parts))
        if reply.failure is not None:
            self._fail(game, reply.failure)
        elif reply.done or game.cut:
            self._over(game, cut=game.speaker.truncated or not reply.done)
        else:
            self._give_turn(game, reply, version)

    def _give_turn(self, game: Game, reply: Reply, version: int) -> None:
        """Put what the next agent is shown behind its tokens, if there is room for a turn."""
        assert reply.agent is not None
        game.seat = self._players.names.index(reply.agent)
        try:
            room = self._shown(game.speaker, reply.observation or "", version)
        except NotServed as error:
            self._environments.pool.abandon([game.name])
            self._fail(game, f"'{reply.agent}': {error}")
            return
        if room:
            self._ready.append(game)
            return
        self._environments.pool.abandon([game.name])
        self._over(game, cut=True)

    def _shown(self, seat: Episode, text: str, version: int) -> bool:
        """Put the tokens of what an agent is shown behind its own; return whether they leave room for a turn.

        Raises:
            NotServed: the prompt is too long, or the chat template has no place for it.
        """
        players = self._players
        ask = Ask(messages=[{"role": "user", "content": text}]) if players.chat else Ask(text=text)
        if not seat.turn_ends:
            prompt = players.served.whole(ask)
            if len(prompt) > (most := players.served.max_prompt_tokens):
                raise NotServed(f"its prompt has {len(prompt)} tokens, more than data.max_prompt_tokens ({most})")
            seat.prompt = prompt
            return True
        observed = players.served.following(replace(ask, follows=True), [], seat.turn(len(seat.turn_ends)))
        if observed is None:
            raise NotServed(NOT_FOLLOWED)
        if len(seat.tokens) + len(observed) >= self._share.sampling.max_tokens:
            return False
        seat.observed(observed, version)
        return True

    def _fail(self, game: Game, failure: str) -> None:
        for seat in game.seats:
            seat.earned = replace(seat.earned, failure=failure)
        self._over(game, cut=False)

    def _over(self, game: Game, cut: bool) -> None:
        for seat in game.seats:
            seat.truncated |= cut
            seat.seconds = time.perf_counter() - seat.began
        del self._live[game.name]

    # ---- the policy's turn ---------------------------------------------------------------------------------------

    def _next_turn(self, loop: DecodeLoop, game: Game) -> None:
        share, speaker = self._share, game.speaker
        game.turns += 1
        speaker.turns += 1
        parameters = copy.copy(share.parameters)
        parameters.max_tokens = share.sampling.max_tokens - len(speaker.tokens)
        seeds = None
        if share.own_streams:
            seeds = [turn_seed(share.sampling.seed, speaker.position, speaker.sample, game.turns)]
        prompt = speaker.prompt + speaker.tokens
        speaker.prompt_tokens += len(prompt)
        name = f"{share.number}-{game.place}-{game.turns}"
        loop.request(self, {name: game.number}, prompt, parameters, seeds)


def _place(game: Game) -> str:
    return game.place
