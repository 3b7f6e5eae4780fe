"""A generation of episodes: policy and environment take turns, and vLLM never waits for an environment.

A turn is one request of the decode loop. It ends at a stop token, or at its limit; its tokens stay exactly as they
were sampled. The environment gets their text, its observation is tokenised by itself and put behind them, and all
tokens so far are the prompt of the next turn, which vLLM's prefix cache knows already. Text never becomes tokens a
second time, so what the trainer sees is what the policy saw and sampled; the mask says which tokens it sampled.

Of an environment with tools the turns are those of a chat: what stands between two of them comes from the model's chat
template (penstock/engines/rollout/chat.py). An agent asks for turns instead of answering them: what it asks first is
the prompt.

Many episodes are under way. Environments answer in processes of their own (penstock/environments/pool.py); the loop
asks after each step of vLLM what has come. With `in_step` it waits for all answers first: then no timing has a part in
which sequences are computed together, and a repeated generation is the same to the last bit.

Where episodes are carried over, environments of those that a generation leaves live on and may answer meanwhile. One
that is gone is played again, until it is as far as its episode.

Suffixes: `_P` prompts, `_B` episodes (of a prompt side by side), `_T` tokens of all episodes, `_U` unlike prompts.
Left out: an episode by itself (penstock/engines/rollout/episode.py), stepping vLLM
(penstock/engines/rollout/decode_loop.py), single responses (penstock/engines/rollout/responses.py), what an environment
is (penstock/environments/environment.py).
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import NO_SEED, Asked, CarriedResponses
from penstock.engines.rollout.agents import Agents
from penstock.engines.rollout.carried import resumed
from penstock.engines.rollout.decode_loop import DecodeLoop, Request, Share
from penstock.engines.rollout.detokenize import decode
from penstock.engines.rollout.environments.host import Alive, Environments
from penstock.engines.rollout.episode import (
    Episode,
    Placed,
    begun_turn,
    carried_episodes,
    heard,
    known_of,
    under_way,
)
from penstock.engines.rollout.partial_results import EndedResponse, PartialResultSender
from penstock.engines.rollout.paths.places import paths_of, used_up
from penstock.engines.rollout.responses import Generated, Left
from penstock.environments.gateway.asks import Ask
from penstock.environments.pool import Asking
from penstock.environments.worker import Call, Reply

# Why an episode that was played again, where another engine or none has it, is not the one that was carried.
OBSERVED = "their environments, played again, answered otherwise"
ASKED = "their agents, played again, asked otherwise"
BESIDE = "their agents had turns beside the conversation, which are not kept"
NOT_BRIDGED = "a turn with tool calls did not end as the chat template ends turns, so the results cannot follow it"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Played(Generated):
    """What one engine played: `samples` episodes side by side for each of its prompts."""

    mask_T: np.ndarray  # 1 for the tokens that the policy sampled, 0 for observations
    turns_B: np.ndarray
    replies: list[Reply]  # of each episode: its rewards added up, its failure
    waited_seconds: float  # in which vLLM stood still because environments had not answered
    asked: Asked | None  # of agents


@dataclass(frozen=True)
class _Drawn:
    """Whose turn a request of the decode loop is, and how many tokens of it there were before."""

    episode: Episode
    placed: Placed
    choice: int
    before: int = 0


def turn_seed(seed: Sequence[int], position: int, sample: int, *turn: int) -> int:
    """Return the seed of a turn, 63 bits; turn 0 is the environment's `reset`, what follows a 0 is beside the turns."""
    return int(np.random.SeedSequence([*seed, position, sample, *turn]).generate_state(1, np.uint64)[0]) >> 1


class EpisodeLoop:
    """Plays a share's episodes until each of them has ended; a turn is a request of the decode loop.

    Args:
        share: its `sampling.max_tokens` bounds all tokens of an episode, observations included.
        in_step: wait for all environments before each step of vLLM.
        sender: gets the episodes that end; None: nobody wants them before the others.
    """

    def __init__(
        self, share: Share, environments: Environments, in_step: bool, sender: PartialResultSender | None = None
    ) -> None:
        self._share, self._environments, self._in_step = share, environments, in_step
        self._episodes: list[Episode] = []
        self._live: dict[str, Episode] = {}
        self._untaken: deque[int] = deque()  # prompts taken from the queue whose episodes have not begun
        self._left: dict[int, int] = {}  # of each prompt's episodes, by its position
        self._asking = Asking(environments.pool, in_step)
        self._ready: list[Episode] = []  # whose next turn may begin
        self._drawn: dict[int, _Drawn] = {}  # by the number that the decode loop has of a request
        self._numbers = count()
        self._complete: list[int] = []  # positions of prompts whose episodes have ended since the last step
        self._counted: set[int] = set()  # positions of prompts that count
        self._sender, self._untold = sender, list[EndedResponse]()
        self._untold_counted: list[int] | None = None if share.all_count else []
        self._given_up = 0  # tokens that are lost: of turns under way at the end, and of episodes that began anew
        self._anew = Counter[str]()  # why carried episodes began anew, and how many
        self._began = time.perf_counter()
        self._seconds = 0.0
        if self._carries:
            self._let_others_go()

    @property
    def _carries(self) -> bool:
        return self._share.carried is not None

    @property
    def ended(self) -> bool:
        """Whether every episode of the share has ended, or those of enough prompts."""
        return self._share.quota.reached or not (self._live or self._untaken or not self._share.queue.exhausted)

    def feed(self, loop: DecodeLoop) -> None:
        """Begin episodes that there is room for, and hand in the turns whose environments have answered."""
        share, samples = self._share, self._share.sampling.samples
        if not self._untaken and not share.queue.exhausted and self._has_room(loop):
            self._untaken.extend(share.queue.take(max(1, (share.room - len(self._live)) // samples)))
        while self._untaken and self._has_room(loop):
            self._begin(self._untaken.popleft(), loop.version)
        self._hear(loop)
        while self._in_step and self._asking.unanswered:  # environments that are played again
            self._hear(loop)
        ready, self._ready = self._ready, []
        for episode in sorted(ready, key=_place) if self._in_step else ready:
            self._draw_round(loop, episode)

    def collect(self, ended: list[Request]) -> None:
        """Let the environments answer the turns that have ended."""
        self._seconds = time.perf_counter() - self._began
        complete, self._complete = sorted(self._complete), []
        counted = self._share.quota.count(complete)
        self._counted.update(counted)
        if self._sender is not None:
            if self._untold_counted is not None:
                self._untold_counted += counted
            self._sender.send(self._untold, self.ended, self._gathered, self._untold_counted)
        if not ended:
            return
        episodes = []
        for request in ended:
            drawn = self._drawn.pop(request.row)
            drawn.episode.taken(drawn.placed, drawn.choice, request)
            if drawn.episode.owed:
                episodes.append(drawn.episode)
        if self._share.quota.reached and not self._carries:
            return
        if self._environments.agents is not None:
            self._tell_agents(self._environments.agents, episodes)
            self._asking.send()
            return
        turns = [episode.turn(episode.turns) for episode in episodes]
        for episode, call in zip(episodes, self._calls(episodes, turns), strict=True):
            self._asking.ask(replace(call, last=self._is_last(episode)))
        self._asking.send()

    def give_up(self, requests: list[Request], tokens: int) -> None:
        """Keep what there is, where episodes are carried over; remember how much was sampled in vain."""
        self._given_up += tokens
        if self._carries:
            for request in requests:
                drawn = self._drawn[request.row]
                self._given_up -= len(request.tokens) - drawn.before
                if self._environments.agents is None:
                    drawn.episode.sampled(request)
                else:
                    drawn.episode.left(drawn.placed, drawn.choice, request)

    def generated(self) -> Played:
        """Return the episodes that count, once the generation has ended."""
        left = self._leave()
        for why, number in self._anew.items():
            _log.warning("%d episodes that were carried over began anew: %s", number, why)
        episodes = [episode for episode in self._episodes if episode.position in self._counted]
        unused = [episode for episode in self._episodes if episode.position not in self._counted]
        versions = [episode.policys_versions for episode in episodes]
        tokens = Ragged.of([episode.joined("tokens") for episode in episodes], np.int32)
        logprobs = Ragged.of([episode.joined("logprobs") for episode in episodes], np.float32).values_T
        return Played(
            positions_P=np.asarray([episode.position for episode in episodes if episode.sample == 0], np.int64),
            rows_B=np.asarray([episode.row for episode in episodes], np.int64),
            responses=tokens,
            logprobs_T=logprobs if self._share.sampling.logprobs else None,
            truncated_B=np.asarray([episode.truncated for episode in episodes], bool),
            first_version_B=np.asarray([first for first, _ in versions], np.int64),
            last_version_B=np.asarray([last for _, last in versions], np.int64),
            seconds_B=np.asarray([episode.seconds for episode in episodes], np.float32),
            prompt_tokens=sum(episode.prompt_tokens for episode in episodes),
            cached_tokens=sum(episode.cached_tokens for episode in episodes),
            seconds=self._seconds,
            unused_tokens=self._given_up
            + (0 if self._carries else sum(sum(episode.joined("mask")) for episode in unused)),
            versions_T=self._versions_of(episodes) if self._carries else None,
            left=left,
            routes=None,
            mask_T=Ragged.of([episode.joined("mask") for episode in episodes], np.uint8).values_T,
            turns_B=np.asarray([episode.turns for episode in episodes], np.int64),
            replies=[episode.earned for episode in episodes],
            waited_seconds=self._asking.waited_seconds,
            asked=self._asked(episodes),
        )

    def _gathered(
        self,
        episodes: Sequence[Episode],
        ended: Sequence[bool] | None = None,
        known: Mapping[int, str] | None = None,
    ) -> CarriedResponses:
        """Return what there is of episodes; all have ended unless told otherwise."""
        ended = [True] * len(episodes) if ended is None else ended
        logprobs, engine = self._share.sampling.logprobs, self._share.engine
        return carried_episodes(episodes, ended, logprobs, engine, self._asked(episodes), known)

    def _asked(self, episodes: Sequence[Episode]) -> Asked | None:
        agents = self._environments.agents
        if agents is None:
            return None
        asked = asked_of(episodes, self._environments.tokenizer)
        return replace(asked, paths=paths_of(episodes)) if agents.max_paths > 1 else asked

    def _versions_of(self, episodes: list[Episode]) -> np.ndarray:
        return Ragged.of([episode.joined("versions") for episode in episodes], np.int32).values_T

    # ---- episodes that are carried over --------------------------------------------------------------------------

    def _let_others_go(self) -> None:
        """Abandon what earlier generations have left and this one does not go on with."""
        wanted, live = under_way(self._share.carried), self._environments.live
        others = [seed for seed, alive in live.items() if wanted.get(seed) != alive.known]
        self._environments.pool.abandon([str(seed) for seed in others])
        for seed in others:
            del live[seed]

    def _go_on(self, episode: Episode, number: int) -> None:
        """Let an episode be as carried response `number`, and go on from there."""
        carried = self._share.carried
        assert carried is not None
        episode.restore(carried, number)
        if carried.ended_B[number]:
            self._over(episode)
            return
        alive = self._environments.live.pop(episode.seed, None)
        if self._environments.agents is not None:
            if alive is None and episode.unbridged:
                self._begin_anew(episode, episode.version, BESIDE)
                return
            episode = self._agent_goes_on(episode, None if alive is None else alive.episode)
        self._live[episode.name] = episode
        if alive is None:
            episode.replayed = 0
            self._reset(episode)
        elif episode.owed:
            self._asking.unanswered.add(episode.name)
        else:
            self._ready.append(episode)

    def _agent_goes_on(self, episode: Episode, alive: Episode | None) -> Episode:
        """Return an agent's episode with the turns that are under way.

        Args:
            episode: as it was carried.
            alive: the one that this engine has left, whose agent waits for its answers.
        """
        if alive is None:
            episode.round = [begun_turn(episode, self)]
            return episode
        alive.moved(episode.row, episode.position, episode.sample)
        self._episodes[episode.row] = alive
        for placed in alive.round:
            for request in placed.drawn.values():  # known here by the numbers of another generation
                request.owner, request.row = self, next(self._numbers)
        return alive

    def _is_as_before(self, episode: Episode, turn: int, reply: Reply) -> bool:
        """Whether an environment that is played again answered a turn with what the policy has read."""
        if reply.failure is not None or reply.done:
            return False
        if (agents := self._environments.agents) is not None:
            return agents.comes_again(episode, turn, reply.asks)
        return self._observation(episode.turn(turn) if turn else [], reply) == episode.observation(turn)

    def _play_again(self, episode: Episode, reply: Reply, version: int) -> None:
        """Tell an environment the next turn if it answered what the policy has read; else the episode begins anew."""
        turn = episode.replayed
        assert turn is not None
        if not self._is_as_before(episode, turn, reply):
            otherwise = OBSERVED if self._environments.agents is None else ASKED
            self._begin_anew(episode, version, reply.failure or otherwise)
        elif turn == len(episode.turn_ends):
            episode.replayed = None
            for placed in episode.round:
                (placed.ask,) = reply.asks
            self._ready.append(episode)
        else:
            episode.replayed = turn = turn + 1
            last = turn == len(episode.turn_ends) and episode.owed and self._is_last(episode)
            self._asking.ask(replace(self._call_again(episode, turn, reply), last=last))

    def _call_again(self, episode: Episode, turn: int, reply: Reply) -> Call:
        agents = self._environments.agents
        if agents is None:
            (call,) = self._calls([episode], [episode.turn(turn)])
            return call
        (text,) = decode(self._environments.tokenizer, Ragged.of([episode.turn(turn)], np.int32))
        (ask,) = reply.asks
        told = agents.told_again(episode, turn, ask, text, self._share.parameters.stop_token_ids)
        return Call(episode.name, turns=[[told]])

    def _begin_anew(self, episode: Episode, version: int, why: str) -> None:
        begun = [request for placed in episode.round for request in placed.begun.values()]
        self._given_up += sum(episode.joined("mask")) + sum(len(request.tokens) for request in begun)
        self._anew[why] += 1
        if self._environments.agents is not None:
            self._environments.pool.abandon([episode.name])  # it waits for an answer
        prompt = self._share.prompts.row(episode.position).tolist()
        fresh = Episode(episode.row, episode.position, episode.sample, prompt, episode.seed, version)
        self._episodes[episode.row] = self._live[episode.name] = fresh
        self._reset(fresh)

    def _leave(self) -> Left | None:
        """Abandon the environments of episodes that have not ended, or let them live where these are carried over."""
        if not self._carries:
            self._environments.pool.abandon([*self._live])
            return None
        caught_up = [episode for episode in self._live.values() if episode.replayed is None]
        self._environments.pool.abandon(self._live.keys() - {episode.name for episode in caught_up})
        known = None if self._environments.agents is None else {one.seed: known_of(one) for one in self._live.values()}
        for episode in caught_up:
            if known is None:
                self._environments.live[episode.seed] = Alive(heard(episode.tokens, episode.turn_ends))
                continue
            episode.rest()
            self._environments.live[episode.seed] = Alive(known[episode.seed], episode)
        positions = [position for position in self._left if position not in self._counted]
        by_place = {(episode.position, episode.sample): episode for episode in self._episodes}
        samples = range(self._share.sampling.samples)
        episodes = [by_place[position, sample] for position in positions for sample in samples]
        ended = [episode.name not in self._live for episode in episodes]
        return Left(np.asarray(positions, np.int64), self._gathered(episodes, ended, known))

    # ---- the environments' turn ----------------------------------------------------------------------------------

    def _has_room(self, loop: DecodeLoop) -> bool:
        return loop.has_room(len(self._live), self._share.sampling.samples, self._share.room)

    def _begin(self, position: int, version: int) -> None:
        """Begin the episodes of a prompt, or go on with them."""
        share, samples, carried = self._share, self._share.sampling.samples, self._share.carried
        prompt, played = share.prompts.row(position).tolist(), None if carried is None else carried.episodes
        self._left[position] = samples
        for sample in range(samples):
            seed, number = turn_seed(share.sampling.seed, position, sample, 0), position * samples + sample
            episode = Episode(len(self._episodes), position, sample, prompt, seed, version)
            self._episodes.append(episode)
            if played is not None and number < len(played.seeds_B) and played.seeds_B[number] != NO_SEED:
                self._go_on(episode, number)
            else:
                self._live[episode.name] = episode
                self._reset(episode)

    def _reset(self, episode: Episode) -> None:
        self._asking.ask(Call(episode.name, row=dict(self._environments.rows_P[episode.position]), seed=episode.seed))

    def _hear(self, loop: DecodeLoop) -> None:
        """Take in what environments have answered; wait only if there is nothing else to do."""
        replies = self._asking.hear(busy=bool(loop.decoding or self._ready))
        heard = [self._live[name] for name in replies]
        for episode in sorted(heard, key=_place) if self._in_step else heard:  # which worker was first decides nothing
            self._answered(episode, replies[episode.name], loop.version)
        self._asking.send()

    # ---- the policy's turn ---------------------------------------------------------------------------------------

    def _answered(self, episode: Episode, reply: Reply, version: int) -> None:
        """Put the observation behind the tokens, so that the policy may take its next turn, or end the episode."""
        if episode.replayed is not None:
            if not (episode.owed and episode.replayed == len(episode.turn_ends)):
                self._play_again(episode, reply, version)
                return
            episode.replayed = None
        episode.owed = False
        if reply.asks and self._environments.agents is not None:
            self._asked_for(self._environments.agents, episode, reply.asks, version)
            return
        episode.earn(reply)
        episode.truncated |= reply.cut
        if reply.failure is None and not reply.done and self._goes_on(episode, reply, version):
            self._ready.append(episode)
            return
        episode.seconds = time.perf_counter() - episode.began
        del self._live[episode.name]
        self._over(episode)

    def _over(self, episode: Episode) -> None:
        if self._sender is not None:
            self._untold.append(EndedResponse(episode.position, episode.sample, episode))
        self._left[episode.position] -= 1
        if not self._left[episode.position]:
            self._complete.append(episode.position)

    def _is_last(self, episode: Episode) -> bool:
        return episode.truncated or episode.turns >= self._environments.max_turns

    def _goes_on(self, episode: Episode, reply: Reply, version: int) -> bool:
        """Take in the observation, if another turn is allowed and at least one token of it has room."""
        observed = self._observation(episode.turn(len(episode.turn_ends)) if episode.turn_ends else [], reply)
        if observed is None:
            episode.earned = replace(episode.earned, failure=NOT_BRIDGED)
            return False
        if self._is_last(episode) or len(episode.tokens) + len(observed) >= self._share.sampling.max_tokens:
            episode.truncated = True
            if not episode.turns:
                said = f"the first observation has {len(observed)} tokens and leaves no room for a turn"
                episode.earned = replace(episode.earned, failure=said)
            return False
        episode.observed(observed, version)
        return True

    def _observation(self, turn: list[int], reply: Reply) -> list[int] | None:
        """Return the tokens of what was answered to a turn, or to `reset`; None: they cannot follow the turn's."""
        chat = self._environments.chat
        if chat is not None:
            return chat.bridge(turn, reply.messages) if turn else chat.opening(reply.observation)
        if not reply.observation:
            return []
        tokens: list[int] = self._environments.tokenizer(reply.observation, add_special_tokens=False)["input_ids"]
        return tokens

    def _calls(self, episodes: list[Episode], turns: list[list[int]]) -> list[Call]:
        """Return what environments are told of turns."""
        chat = self._environments.chat
        texts = decode(self._environments.tokenizer, Ragged.of(turns, np.int32))
        asked = [[] if chat is None else chat.tool_calls(turn) for turn in turns]
        told = zip(episodes, texts, asked, strict=True)
        return [Call(episode.name, text=text, tool_calls=calls) for episode, text, calls in told]

    # ---- agents --------------------------------------------------------------------------------------------------

    def _asked_for(self, agents: Agents, episode: Episode, asks: list[Ask], version: int) -> None:
        """Let the policy take the turns that an agent asks for at once, or say why it does not."""
        episode.round = agents.placed(episode, asks, self._share.sampling.max_tokens, version)
        if any(placed.choices for placed in episode.round):
            self._ready.append(episode)
            return
        episode.owed = True
        episode.in_vain += 1
        episode.truncated |= episode.in_vain > self._environments.max_turns  # it would ask for ever, and others wait
        self._asking.ask(Call(episode.name, turns=agents.told(episode, {}), last=self._is_last(episode)))

    def _tell_agents(self, agents: Agents, episodes: list[Episode]) -> None:
        drawn = [request for episode in episodes for placed in episode.round for request in placed.drawn.values()]
        tokens = Ragged.of([request.tokens for request in drawn], np.int32)
        rows = [request.row for request in drawn]
        texts = dict(zip(rows, decode(self._environments.tokenizer, tokens), strict=True))
        for episode in episodes:
            episode.truncated |= used_up(episode, self._share.sampling.max_tokens)
            self._asking.ask(Call(episode.name, turns=agents.told(episode, texts), last=self._is_last(episode)))

    # ---- drawing -------------------------------------------------------------------------------------------------

    def _draw_round(self, loop: DecodeLoop, episode: Episode) -> None:
        """Hand in the next turn, or the rest of one that an earlier generation has begun; or all that is asked."""
        if self._environments.agents is None:
            episode.round = [Placed(paths={0: episode})]
        episode.turns = episode.drawn
        for placed in episode.round:
            if placed.choices:
                self._draw(loop, episode, placed)

    def _draw(self, loop: DecodeLoop, episode: Episode, placed: Placed) -> None:
        share, limit, agents = self._share, self._share.sampling.max_tokens, self._environments.agents
        parameters = copy.copy(share.parameters)
        if not placed.room:
            room = limit - len(episode.tokens) if agents is None else agents.room(episode, placed, limit)
            wanted = room if placed.ask is None else placed.ask.max_tokens or room
            shared = sum(len(other.paths) for other in episode.round) > 1
            placed.room, placed.limited = min(room, wanted), wanted < room or shared
        parameters.max_tokens = placed.room
        prompt = placed.prompt
        names: dict[str, int] = {}
        seeds: list[int] = []
        missing = [choice for choice in range(placed.choices) if choice not in placed.drawn]
        for choice in missing:
            episode.turns += 1
            row = next(self._numbers)
            name, begun = f"{share.number}-{_place(episode)}-{episode.turns}", placed.begun.pop(choice, None)
            self._drawn[row] = _Drawn(episode, placed, choice, 0 if begun is None else len(begun.tokens))
            seed = self._seed(episode, prompt, placed.paths.get(choice) is episode)
            if begun is not None:
                self._draw_rest(loop, resumed(begun, self, row), name, prompt, parameters, seed)
                episode.prompt_tokens += len(begun.tokens)
                continue
            names[name] = row
            seeds.append(seed)
        episode.drawing += len(missing)
        episode.prompt_tokens += len(missing) * len(prompt)
        own_seeds, images = seeds if share.own_streams else None, share.images(episode.position)
        if names:
            loop.request(self, names, prompt, parameters, own_seeds, images, placed.begun_by)

    def _draw_rest(
        self, loop: DecodeLoop, request: Request, name: str, prompt: list[int], parameters: Any, seed: int
    ) -> None:
        """Hand in a turn of an agent that an earlier generation has begun."""
        rest = copy.copy(parameters)
        rest.max_tokens = parameters.max_tokens - len(request.tokens)
        loop.go_on(request, name, prompt, rest, seed if self._share.own_streams else None)

    def _seed(self, episode: Episode, prompt: list[int], goes_on: bool) -> int:
        """Return the seed of a turn: of its first path's next by its number, of one beside that by what it follows.

        So requests that arrive in another order draw the same.
        """
        place = self._share.sampling.seed, episode.position, episode.sample
        if goes_on:
            return turn_seed(*place, len(episode.turn_ends) + 1)
        followed = hashlib.sha256(np.asarray(prompt, np.int64).tobytes()).digest()
        episode.asides[followed] += 1
        return turn_seed(*place, 0, int.from_bytes(followed), episode.asides[followed])


def asked_of(episodes: Sequence[Episode], tokenizer: Any) -> Asked:
    """Return what episodes bring themselves: their prompts, and how much of them is not learnt from."""
    prompts = Ragged.of([episode.prompt for episode in episodes], np.int32)
    _, first_U, number_B = np.unique(prompts.ids_B, return_index=True, return_inverse=True)
    texts_U = [tokenizer.decode(prompts.row(row), skip_special_tokens=False) for row in first_U.tolist()]
    unbridged_B = np.asarray([episode.unbridged for episode in episodes], np.int64)
    return Asked(prompts, [texts_U[number] for number in number_B.tolist()], unbridged_B)


def _place(episode: Episode) -> str:
    return f"{episode.position}-{episode.sample}"
