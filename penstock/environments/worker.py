"""What runs inside a worker process: the user's episodes, each call under a deadline, every failure made a value.

A worker keeps the episodes that began in it. It answers calls one after the other (`Player`), or, where the
environment's methods are `async`, all at once (`AsyncPlayer`). Code that no signal interrupts, or that blocks the event
loop, is ended by killing the process from outside (penstock/environments/pool.py); its other episodes are lost with it,
and their next call says so.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.base.unicode import writable
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.agent import AgentEpisode
from penstock.environments.environment import REFUSED, TOOL_CALLS, TOOL_ERRORS, Step, ToolCall
from penstock.environments.games.game import check_move
from penstock.environments.gateway.asks import Ask, Turn
from penstock.environments.loading import Played, Tooled, is_async, load_environment, stop_texts
from penstock.usercode.guard import DeadlineExceeded, begin_worker, reason_of, reward_and_parts, within, within_loop

HAND_BACK_S = 0.1  # the longest that answers wait here for those of other episodes
GATHER_S = 0.005  # of concurrent calls: how long the first answer waits for others, less than a step of the engine
AT_ONCE = 32  # calls that begin together
APART_S = 0.01  # after which the next ones begin, if those before have not ended


@dataclass(frozen=True)
class Call:
    """One call of an episode: `reset` with a row and a seed, or `step` with a text.

    Attributes:
        episode: its name.
        last: whether the episode is over after this call.
        tool_calls: what the text asks of tools, where the environment has any.
        turns: instead of both, what an agent has asked for: of each request the choices.
    """

    episode: str
    row: dict[str, Any] | None = None
    seed: int = 0
    text: str = ""
    last: bool = False
    tool_calls: list[ToolCall] = field(default_factory=list)
    turns: list[list[Turn]] = field(default_factory=list)


@dataclass(frozen=True)
class Reply:
    """How an environment answered a call.

    Attributes:
        observation: text that the policy sees next.
        messages: the same of an environment with tools, as messages of a chat.
        asks: what an agent asks instead, at once.
        cut: whether an agent asked for more than the episode may have.
        reward: None if it gave none.
        parts: named parts of the reward; empty if it gave a number.
        failure: why the call failed; None if it did not.
        agent: who has the next turn, in a game.
        rewards: what agents of a game have earned, and the named parts of it.
    """

    observation: str | None = None
    done: bool = False
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    cut: bool = False
    agent: str | None = None
    rewards: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """What a worker hands back. Calls are known by their numbers, since an episode's name may be used again.

    Attributes:
        replies: to the calls that have ended.
        under_way: calls that go on meanwhile.
    """

    replies: dict[int, Reply]
    under_way: list[int]


@dataclass(frozen=True)
class Player:
    """Plays the episodes of one worker, call by call; needs the main thread of its process (signals)."""

    make: Callable[[], Played]
    timeout_s: float
    agents: tuple[str, ...] = ()  # of a game
    episodes: dict[str, Played] = field(default_factory=dict)

    def answer(self, calls: dict[int, Call]) -> Answered:
        """Answer at least the first call, and the following ones until it is time to hand back."""
        ends = time.monotonic() + HAND_BACK_S
        replies: dict[int, Reply] = {}
        for number, call in calls.items():
            if replies and time.monotonic() > ends:
                break
            replies[number] = self._answer(call)
        return Answered(replies, [])

    def drop(self, episodes: list[str]) -> Answered:
        """Drop episodes."""
        for name in episodes:
            self.episodes.pop(name, None)
        return Answered({}, [])

    def _answer(self, call: Call) -> Reply:
        try:
            reply = self._reset(call, call.row) if call.row is not None else self._step(call)
        except BaseException as error:  # sys.exit() in an environment is a failed episode, too
            reply = _failed(error, self.timeout_s)
        if _is_over(call, reply):
            self.episodes.pop(call.episode, None)
        return reply

    def _reset(self, call: Call, row: dict[str, Any]) -> Reply:
        with within(self.timeout_s):
            episode = self.make()
            begun = episode.reset(row, call.seed)
        self.episodes[call.episode] = episode
        return _of_reset(call, begun, self.agents)

    def _step(self, call: Call) -> Reply:
        if call.episode not in self.episodes:
            return _LOST
        with within(self.timeout_s):
            step = _turn(self.episodes[call.episode], call)
        return _of_step(call, step, self.agents)


@dataclass(frozen=True)
class _UnderWay:
    call: Call
    task: asyncio.Task[Reply]
    began: float


class AsyncPlayer:
    """Plays the episodes of one worker, all calls at a time, on an event loop in a thread of its own.

    So calls go on, and see their deadlines in time, while the flow of messages to this worker stands still; and one
    loop lasts as long as the worker: clients that the user keeps between calls stay bound to it. What is not `async`
    runs in the loop, too, and holds it up.

    A loop goes round: of hundreds of calls that begin together the first would end when the last does, and the engine
    would have nothing until then. So they begin a few at a time, and what has ended is handed back meanwhile.
    """

    def __init__(self, make: Callable[[], Played], timeout_s: float, agents: tuple[str, ...] = ()) -> None:
        self._make, self._timeout_s, self._agents = make, timeout_s, agents
        self._episodes: dict[str, Played] = {}
        self._unbegun: dict[int, Call] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._beginning: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()  # a call, since answers were handed back
        self._cancelled: set[asyncio.Task[Reply]] = set()  # the loop alone would not keep a task
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def answer(self, calls: dict[int, Call]) -> Answered:
        """Begin calls; return what has ended of all: soon after the first has, or when it is time to hand back."""
        return self._in_loop(self._answer(calls))

    def drop(self, episodes: list[str]) -> Answered:
        """Drop episodes and cancel their calls."""
        return self._in_loop(self._drop(episodes))

    def _in_loop(self, coroutine: Coroutine[Any, Any, Answered]) -> Answered:
        """Wait for a coroutine, for as long as user code blocks the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _answer(self, calls: dict[int, Call]) -> Answered:
        self._unbegun |= calls
        if self._beginning is None or self._beginning.done():
            self._beginning = self._loop.create_task(self._begin_all())
        await self._some_ended()
        replies: dict[int, Reply] = {}
        for number, item in [*self._under_way.items()]:
            if (reply := self._reply(item)) is not None:
                replies[number] = reply
                del self._under_way[number]
        self._has_ended.clear()
        return Answered(replies, [*self._under_way, *self._unbegun])

    async def _begin_all(self) -> None:
        """Begin calls in the order in which they came."""
        while self._unbegun:
            tasks = [self._begin(number) for number in [*self._unbegun][:AT_ONCE]]
            await asyncio.wait(tasks, timeout=APART_S)

    def _begin(self, number: int) -> asyncio.Task[Reply]:
        call = self._unbegun.pop(number)
        task = self._loop.create_task(self._play(call))
        task.add_done_callback(lambda _: self._has_ended.set())
        self._under_way[number] = _UnderWay(call, task, self._loop.time())
        return task

    async def _some_ended(self) -> None:
        """Wait until calls have ended, and a little for others that are about to."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), HAND_BACK_S)
        if self._under_way:
            await asyncio.wait([item.task for item in self._under_way.values()], timeout=GATHER_S)

    def _reply(self, item: _UnderWay) -> Reply | None:
        """Return the reply to a call if there is one."""
        if item.task.done():
            reply = item.task.result()
        elif self._loop.time() - item.began > self._timeout_s + HAND_BACK_S:  # it swallowed its deadline
            self._cancel(item.task)
            reply = self._failed(item.call, DeadlineExceeded())
        else:
            return None
        if _is_over(item.call, reply):
            self._let_go(item.call.episode)
        return reply

    async def _drop(self, episodes: list[str]) -> Answered:
        gone = {*episodes}
        for name in gone:
            self._let_go(name)
        self._unbegun = {number: call for number, call in self._unbegun.items() if call.episode not in gone}
        for number in [number for number, item in self._under_way.items() if item.call.episode in gone]:
            self._cancel(self._under_way.pop(number).task)
        return Answered({}, [*self._under_way, *self._unbegun])

    def _let_go(self, name: str) -> None:
        episode = self._episodes.pop(name, None)
        if isinstance(episode, AgentEpisode):
            episode.close()

    def _cancel(self, task: asyncio.Task[Reply]) -> None:
        """Cancel a task whose reply nobody wants any more; it may end later."""
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)
        task.cancel()

    async def _play(self, call: Call) -> Reply:
        """Answer a call. The episode is there before anything is awaited, and never touched again if it was dropped."""
        try:
            async with within_loop(self._timeout_s):
                if call.row is not None:
                    episode = self._episodes[call.episode] = self._make()
                    return _of_reset(call, await _value(episode.reset(call.row, call.seed)), self._agents)
                if call.episode not in self._episodes:
                    return _LOST
                step = await _value(_turn(self._episodes[call.episode], call))
                return _of_step(call, step, self._agents)
        except BaseException as error:
            return self._failed(call, error)

    def _failed(self, call: Call, error: BaseException) -> Reply:
        """Return why a call failed, and how often its agent was refused something: that may be why."""
        reply, episode = _failed(error, self._timeout_s), self._episodes.get(call.episode)
        refused = episode.refused if isinstance(episode, AgentEpisode) else 0
        return replace(reply, parts={REFUSED: float(refused)}) if refused else reply


_LOST = Reply(failure="lost with its worker process, which another episode took down")


def _is_over(call: Call, reply: Reply) -> bool:
    return call.last or reply.done or reply.failure is not None


def _failed(error: BaseException, timeout_s: float) -> Reply:
    if isinstance(error, DeadlineExceeded):
        return Reply(failure=f"timed out after {timeout_s:g} s")
    return Reply(failure=reason_of(error, __file__))


def _of_reset(call: Call, begun: object, agents: tuple[str, ...]) -> Reply:
    if agents and not isinstance(begun, Step):
        raise TypeError(f"reset returned a {type(begun).__name__}, not a Step that says who has the turn")
    return _of_step(call, begun, agents) if isinstance(begun, Step) else Reply(_text(begun))


def _of_step(call: Call, step: object, agents: tuple[str, ...]) -> Reply:
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}, not a Step")
    if agents:
        return _of_move(call, step, agents)
    if step.agent is not None or step.rewards:
        raise ValueError("a Step with agent or rewards is a game's, and environment.agents names none")
    reward, parts = (None, {}) if step.reward is None else reward_and_parts(step.reward)
    if step.messages:
        parts = {**parts, TOOL_CALLS: float(len(step.messages)), TOOL_ERRORS: float(step.failed_calls)}
    if step.refused:
        parts = {**parts, REFUSED: float(step.refused)}
    if not step.done and not call.last and not (step.observation or step.messages or step.asks):
        raise ValueError("step returned neither an observation nor done=True")
    observation, done = _text(step.observation), bool(step.done)
    messages = [{key: writable(text) for key, text in message.items()} for message in step.messages]
    return Reply(observation, done, reward, parts, messages=messages, asks=step.asks, cut=step.cut)


def _of_move(call: Call, step: Step, agents: tuple[str, ...]) -> Reply:
    check_move(step, agents, call.last)
    paid = {name: reward_and_parts(reward) for name, reward in step.rewards.items() if reward is not None}
    return Reply(_text(step.observation), bool(step.done), agent=step.agent, rewards=paid)


def _turn(episode: Played, call: Call) -> object:
    """Answer a turn, by tools where the environment has any; what is `async` is still to be awaited."""
    if isinstance(episode, AgentEpisode):
        return episode.go_on(call.turns, call.last)
    return episode.answer(call.tool_calls, call.last) if isinstance(episode, Tooled) else episode.step(call.text)


def _text(observation: object) -> str | None:
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"the observation is a {type(observation).__name__}, not text")
    return writable(observation) if observation else None


async def _value(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


# ---- the process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """What a worker says once it has started.

    Attributes:
        stop: the texts that end a turn.
        is_async: whether its calls run concurrently.
        has_tools: whether it is played by tools.
        is_agent: whether it asks the policy, instead of answering it.
    """

    stop: tuple[str, ...]
    is_async: bool
    has_tools: bool = False
    is_agent: bool = False


_player: Player | AsyncPlayer
_started: Started


def start(config: dict[str, Any]) -> None:
    """Prepare this worker process; runs once, before its first call."""
    global _player, _started
    begin_worker()
    settings = EnvironmentConfig.model_validate(config)
    make = load_environment(settings)
    episode = make()
    has_tools = isinstance(episode, Tooled)
    stop = () if has_tools else stop_texts(settings.type, episode)
    _started = Started(stop, is_async(episode), has_tools, isinstance(episode, AgentEpisode))
    agents = tuple(settings.agents or ())
    _player = (AsyncPlayer if _started.is_async else Player)(make, settings.timeout_s, agents)
    gc.collect()
    gc.freeze()  # what was imported stays, and is not looked through again while episodes come and go


def started() -> Started:
    """What the pool has to know of the environment; the answer also says that the worker has started."""
    return _started


def answer(calls: dict[int, Call]) -> Answered:
    """`answer` of this worker's player."""
    return _player.answer(calls)


def drop(episodes: list[str]) -> Answered:
    """`drop` of this worker's player."""
    return _player.drop(episodes)
