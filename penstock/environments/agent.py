"""An agent: code of a user's own that asks the policy for its turns over HTTP, as it would ask any model's server.

    class Quiz:
        async def run(self, row, seed, policy):
            client = AsyncOpenAI(base_url=policy.url, api_key="-")
            question = {"role": "user", "content": row["question"]}
            said = await client.chat.completions.create(model=policy.model, messages=[question])
            return float(row["answer"] in said.choices[0].message.content)

An environment answers the policy; an agent asks it. To the rollout engine both are the same: an episode whose turns the
policy takes, with tokens between them that it did not sample. So an episode with an agent waits in its worker for what
the agent asks next, or for its end, whichever comes first.

Left out: the endpoint (penstock/environments/gateway/), how what is asked becomes tokens
(penstock/engines/rollout/agents.py), deadlines and processes (penstock/environments/worker.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.environments.environment import Reward, Step
from penstock.environments.gateway.server import Session, Turn, gateway

MODEL = "policy"
AT_A_TIME = 1024  # agents that are not `async` and wait in threads of a process

_threads = ThreadPoolExecutor(AT_A_TIME, "agent")


@dataclass(frozen=True)
class Policy:
    """Where an agent finds the policy.

    Attributes:
        url: of an endpoint of this episode's own, to which nobody else knows the way: `http://127.0.0.1:PORT/KEY/v1`.
        model: the name to ask for.
    """

    url: str
    model: str = MODEL


class Agent(Protocol):
    """One episode. A class is called with `environment.settings` as keyword arguments, once for each."""

    def run(self, row: dict[str, Any], seed: int, policy: Policy) -> Any:
        """Play the episode of a data row and return its reward: a number, named parts, or None. It may be `async`.

        An exception fails the episode, whose tokens are then not learnt from as if they had been worth nothing. Of an
        episode that is cut, at its turns or its tokens, a request is refused, and an exception is no failure.

        Args:
            row: the columns of the data row that the prompt came from.
            seed: for everything random; another one for each sample of a prompt, the same when an iteration is
                repeated.
            policy: whom to ask.
        """


def is_agent(made: object) -> bool:
    """Whether an object plays episodes by asking the policy: it has `run`, and neither `reset` nor `step`."""
    return callable(getattr(made, "run", None)) and not (hasattr(made, "reset") or hasattr(made, "step"))


class AgentEpisode:
    """An episode that an agent plays, for the worker that it lives in; all of it in one event loop.

    Args:
        several: whether several of its paths are learnt from.
    """

    def __init__(self, played: Agent, several: bool = False) -> None:
        self._played, self._several = played, several
        self._session: Session | None = None
        self._running: asyncio.Task[Reward] | None = None

    @property
    def stop(self) -> object:
        """The texts that end a turn, besides the model's own."""
        return getattr(self._played, "stop", ())

    @property
    def refused(self) -> int:
        """Requests that got no turn, though the episode was not at its end."""
        return 0 if self._session is None else self._session.refused

    async def reset(self, row: dict[str, Any], seed: int) -> Step:
        """Start the agent; return what it asks first, or its reward if it asks nothing."""
        self._session = gateway().open(self._several)
        call = _called(self._played.run, row, seed, Policy(self._session.url))
        self._running = asyncio.create_task(call)
        self._running.add_done_callback(self._agent_ended)
        return await self._next()

    async def go_on(self, turns: list[list[Turn]], last: bool) -> Step:
        """Give the agent what it has asked for; return what it asks next, or its reward.

        Args:
            turns: of each request the choices.
            last: whether nothing more is answered, so that the agent has to end.
        """
        assert self._session is not None
        self._session.answer(turns, last)
        return await self._next()

    def close(self) -> None:
        """End the agent, whatever it is doing; one in a thread ends when it asks again."""
        if self._session is not None:
            self._session.close()
        if self._running is not None:
            self._running.cancel()

    def _agent_ended(self, _: object) -> None:
        assert self._session is not None
        self._session.end()

    async def _next(self) -> Step:
        assert self._session is not None and self._running is not None
        asks = await self._session.asked()
        if asks:
            return Step(asks=asks)
        refused = self.refused  # what the agent has left behind is none of these
        self._session.close()
        cut = self._session.cut
        gave_up = cut and self._running.exception() is not None  # as clients do that are refused
        reward = None if gave_up else self._running.result()
        return Step(done=True, reward=reward, cut=cut, refused=refused)


async def _called(run: Callable[..., Any], *arguments: Any) -> Reward:
    if inspect.iscoroutinefunction(run):
        reward: Reward = await run(*arguments)
        return reward
    value = await asyncio.get_running_loop().run_in_executor(_threads, run, *arguments)
    return await value if inspect.isawaitable(value) else value
