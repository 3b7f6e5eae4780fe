"""The interface of an environment: the policy speaks, it answers, until the episode is over.

One object per episode. It is made in a worker process, lives there as long as its episode, and sees text alone: which
tokens the policy sampled, and which of them are trained on, is the rollout engine's business
(penstock/engines/rollout/episodes.py).

Left out: loading a user's class (penstock/environments/loading.py), one whose methods are tools
(penstock/environments/tools.py), games of several agents (penstock/environments/games/), worker processes
(penstock/environments/pool.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.environments.gateway.asks import Ask

TOOL_CALLS, TOOL_ERRORS = "tools/calls", "tools/errors"  # counts beside the parts of a reward, added up like these
REFUSED = "requests/refused"  # likewise: an agent's requests that it got no turn for
Reward = float | dict[str, float] | None


@dataclass(frozen=True)
class ToolCall:
    """What the policy asks of a tool.

    Attributes:
        arguments: by name; None where what it wrote is no JSON object.
    """

    name: str
    arguments: dict[str, Any] | None


@dataclass(frozen=True)
class Step:
    """How an environment answers a turn.

    Attributes:
        observation: text that the policy sees next; needed unless the episode is done.
        messages: the same as messages of a chat (`role`, `name`, `content`), of an environment with tools.
        asks: what an agent asks instead, at once.
        cut: whether an agent asked for more than the episode may have.
        refused: how many requests of an agent's got no turn, though the episode was not at its end.
        failed_calls: how many of the messages are of calls of tools that went wrong.
        done: whether the episode is over.
        reward: what the turn was worth, a number or named parts; an episode's reward is the sum over its turns.
        agent: who has the next turn, in a game of several agents, and sees the observation.
        rewards: what agents have earned in such a game, by their names.
    """

    observation: str | None = None
    done: bool = False
    reward: Reward = None
    messages: list[dict[str, str]] = field(default_factory=list)
    failed_calls: int = 0
    asks: list[Ask] = field(default_factory=list)
    cut: bool = False
    refused: int = 0
    agent: str | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)


class Environment(Protocol):
    """One episode.

    A class is called with `environment.settings` as keyword arguments. Its attribute `stop`, a tuple of texts, names
    what ends a turn besides the end-of-sequence token: the closing of a tool call, for instance. Each has to be a
    single token of the model; a token that contains it ends a turn, too.

    `reset` and `step` may be `async`, either or both: then the calls of a worker's episodes run concurrently.
    """

    def reset(self, row: dict[str, Any], seed: int) -> str | None | Awaitable[str | None]:
        """Begin the episode of a data row; return what the policy sees after the prompt, if anything.

        Args:
            row: the columns of the data row that the prompt came from.
            seed: for everything random; another one for each sample of a prompt, the same when an iteration is
                repeated. With `rollout.carry` a new engine plays an episode again from it and its turns.
        """

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answer a turn of the policy.

        Called for every turn, also for one that was cut at a limit, after which the episode is over whatever this
        returns.

        Args:
            text: the turn's tokens, decoded without special tokens; what ended it is included.
        """
