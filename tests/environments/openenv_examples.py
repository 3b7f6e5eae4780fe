"""Environments on OpenEnv's own library, for an interpreter that has it; its package brings no more than the echo.

`uvicorn openenv_examples:coding` runs Python by the executor that OpenEnv's coding environment is made of, and
`uvicorn openenv_examples:shop` has MCP tools.
"""

from __future__ import annotations

import os
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.tools.local_python_executor import PyExecutor

SESSIONS = int(os.environ.get("SESSIONS", "4"))


class CodeAction(Action):
    """A program."""

    code: str


class CodeObservation(Observation):
    """How it went."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class Coding(Environment):
    """Programs of an episode share their variables; whoever makes `wanted` of the reset has solved it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._executor, self._wanted, self._seed = PyExecutor(), "", -1

    def reset(self, seed: int | None = None, wanted: str = "", **_: Any) -> CodeObservation:
        self._executor, self._wanted = PyExecutor(), wanted
        self._seed = -1 if seed is None else seed
        return CodeObservation(stdout=f"seed {self._seed}")

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> CodeObservation:  # noqa: ARG002
        assert isinstance(action, CodeAction)
        if action.code == "raise":
            raise RuntimeError("the environment itself is broken")
        done = self._executor.run(action.code)
        right = bool(self._wanted) and done.stdout.strip() == self._wanted
        return CodeObservation(
            stdout=done.stdout, stderr=done.stderr, exit_code=done.exit_code, done=right, reward=1.0 if right else -0.25
        )

    @property
    def state(self) -> State:
        return State()


class Number(Action):
    """A number, which is not what every text is."""

    number: int


class Sums(Environment):
    """Adds numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._sum = 0

    def reset(self, **_: Any) -> CodeObservation:
        return CodeObservation(stdout="")

    def step(self, action: Action, **_: Any) -> CodeObservation:
        assert isinstance(action, Number)
        self._sum += action.number
        return CodeObservation(stdout=str(self._sum))

    @property
    def state(self) -> State:
        return State()


class Shop(MCPEnvironment):
    """Sells tea, in as many steps as are wanted; what is bought is the session's own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._bought, self._budget = 0, 0
        server = FastMCP("shop")

        @server.tool
        def price_of(item: str) -> int:
            """Look up a price.

            Args:
                item: what is sold
            """
            return {"tea": 3}[item]

        @server.tool
        def buy(count: int) -> str:
            """Buy some tea.

            Args:
                count: how much
            """
            self._bought += count
            return f"{self._bought} of {self._budget}"

        @server.tool
        def leave() -> None:
            """End the server."""
            os._exit(3)

        super().__init__(server)

    def reset(self, seed: int | None = None, budget: int = 2, **_: Any) -> Observation:  # noqa: ARG002
        self._bought, self._budget = 0, budget
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        seen = await super().step_async(action, timeout_s, **more)
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            seen.reward, seen.done = 0.5, self._bought >= self._budget
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise TypeError(f"no tool: {action}")

    @property
    def state(self) -> State:
        return State()


coding = create_app(Coding, CodeAction, CodeObservation, max_concurrent_envs=SESSIONS)
sums = create_app(Sums, Number, CodeObservation, max_concurrent_envs=SESSIONS)
shop = create_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=SESSIONS)
