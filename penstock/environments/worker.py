"""What runs inside a worker process: the user's episodes, each call under a deadline, every failure made a value.

A worker keeps the episodes that began in it. Code that no signal interrupts is ended by killing the process from
outside (penstock/environments/pool.py); its other episodes are lost with it, and their next call says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from configs.sections.rollout import EnvironmentConfig
from penstock.environments.environment import Environment, Step
from penstock.environments.loading import load_environment, stop_texts
from penstock.usercode.guard import DeadlineExceeded, begin_worker, reason_of, reward_and_parts, within

HAND_BACK_S = 0.1  # the longest that answers wait here for those of other episodes


@dataclass(frozen=True)
class Call:
    """One call of an episode: `reset` with a row and a seed, or `step` with a text.

    Attributes:
        episode: its name.
        last: whether the episode is over after this call.
    """

    episode: str
    row: dict[str, Any] | None = None
    seed: int = 0
    text: str = ""
    last: bool = False


@dataclass(frozen=True)
class Reply:
    """How an environment answered a call.

    Attributes:
        reward: None if it gave none.
        parts: named parts of the reward; empty if it gave a number.
        failure: why the call failed; None if it did not.
    """

    observation: str | None = None
    done: bool = False
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Player:
    """Plays the episodes of one worker; needs the main thread of its process (signals)."""

    make: Callable[[], Environment]
    timeout_s: float
    episodes: dict[str, Environment] = field(default_factory=dict)

    def answer(self, calls: list[Call]) -> list[Reply]:
        """Answer at least the first call, and the following ones until it is time to hand back."""
        ends = time.monotonic() + HAND_BACK_S
        replies: list[Reply] = []
        for call in calls:
            if replies and time.monotonic() > ends:
                break
            replies.append(self._answer(call))
        return replies

    def _answer(self, call: Call) -> Reply:
        try:
            reply = self._reset(call, call.row) if call.row is not None else self._step(call)
        except DeadlineExceeded:
            reply = Reply(failure=f"timed out after {self.timeout_s:g} s")
        except BaseException as error:  # sys.exit() in an environment is a failed episode, too
            reply = Reply(failure=reason_of(error, __file__))
        if call.last or reply.done or reply.failure is not None:
            self.episodes.pop(call.episode, None)
        return reply

    def _reset(self, call: Call, row: dict[str, Any]) -> Reply:
        with within(self.timeout_s):
            episode = self.make()
            observation = episode.reset(row, call.seed)
        self.episodes[call.episode] = episode
        return Reply(_text(observation))

    def _step(self, call: Call) -> Reply:
        if call.episode not in self.episodes:
            return Reply(failure="lost with its worker process, which another episode took down")
        with within(self.timeout_s):
            step = self.episodes[call.episode].step(call.text)
        if not isinstance(step, Step):
            raise TypeError(f"step returned a {type(step).__name__}, not a Step")
        reward, parts = (None, {}) if step.reward is None else reward_and_parts(step.reward)
        if not step.done and not call.last and not step.observation:
            raise ValueError("step returned neither an observation nor done=True")
        return Reply(_text(step.observation), bool(step.done), reward, parts)


def _text(observation: object) -> str | None:
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"the observation is a {type(observation).__name__}, not text")
    return observation or None


# ---- the process ---------------------------------------------------------------------------------------------------

_player: Player
_stop: tuple[str, ...]


def start(config: dict[str, Any]) -> None:
    """Prepare this worker process; runs once, before its first call."""
    global _player, _stop
    begin_worker()
    settings = EnvironmentConfig.model_validate(config)
    _player = Player(load_environment(settings), settings.timeout_s)
    _stop = stop_texts(settings.type, _player.make())


def stop() -> tuple[str, ...]:
    """The texts that end a turn; the answer also says that the worker has started."""
    return _stop


def answer(calls: list[Call]) -> list[Reply]:
    """`Player.answer` in this worker."""
    return _player.answer(calls)


def forget() -> None:
    """Drop every episode."""
    _player.episodes.clear()
