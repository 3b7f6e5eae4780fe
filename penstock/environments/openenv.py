"""Episodes on servers of OpenEnv: those with actions and observations of their own, and those whose actions are tools.

    environment: {type: "penstock.environments.openenv:Gym",
                  settings: {server: echo, action: message, observation: echoed_message}}
    environment: {type: "penstock.environments.openenv:Tools", settings: {server: shop}}

Each episode has a session of its own. Its reward, and when it is over, is what the server says; a turn that calls no
tool is the answer and ends an episode with tools, as elsewhere.

Left out: which servers there are, and their messages (penstock/environments/openenv_servers.py); actions of several
fields (a class derived from `Gym` may make them of a turn's text); taking out of observations what would become control
tokens; observations that are no text or JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

from penstock.base.errors import UserError
from penstock.environments.environment import Step, ToolCall
from penstock.environments.openenv_servers import FILE, Refused, Session, begin, entry_of, running, started
from penstock.environments.tools import Failed, told

SEEDS = 1 << 31  # what generators of random numbers take, NumPy's older one among them
ASKED_S = 60.0  # for a server to tell of its tools, once it listens
NOTHING = "(nothing)"  # of a step whose observation is empty
MISFITS = {"missing", "extra_forbidden"}  # a field that is not the action's: a mistake of the recipe


class Gym:
    """One episode of a server with actions and observations of its own.

    Args:
        server: its name in `.openenv.json`.
        action: the field of its actions that gets the turn's text.
        observation: the field of its observations that the policy sees, or several.
        reset: columns of the data row that are told to the server at the beginning, beside the seed.
        opening: whether the policy sees the first observation, behind the prompt.
        before: text before each observation but the first.
        after: text behind each observation.
        stop: texts that end a turn.

    Raises:
        UserError: there is no such file or server, or its entry cannot be used.
    """

    def __init__(
        self,
        server: str,
        action: str,
        observation: str | Sequence[str],
        reset: Sequence[str] = (),
        opening: bool = True,
        before: str = "",
        after: str = "",
        stop: Sequence[str] = (),
    ) -> None:
        self._name, self._entry, self._columns = server, entry_of(server), reset
        self._action, self._opening, self._before, self._after = action, opening, before, after
        self._shown = [observation] if isinstance(observation, str) else [*observation]
        self.stop = tuple(stop)
        self._session: Session

    def action_of(self, text: str) -> dict[str, Any]:
        """Return the action that a turn's text stands for."""
        return {self._action: text}

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Begin a session, with the seed and what is told of the row."""
        self._session, answer = await _begun(self._name, self._entry, _reset_arguments(self._columns, row, seed))
        if not self._opening:
            return None
        text = self._text(answer["observation"])
        return text + self._after if text else None

    async def step(self, text: str) -> Step:
        """Take a turn as an action. One that the server's field cannot be is told to the policy."""
        try:
            answer = await self._session.ask("step", self.action_of(text))
        except Refused as error:
            if not error.kinds or error.kinds & MISFITS:
                raise
            return Step(self._before + error.said + self._after)
        seen = self._text(answer["observation"]) or NOTHING
        return Step(self._before + seen + self._after, bool(answer.get("done")), answer.get("reward"))

    def _text(self, observation: dict[str, Any]) -> str:
        for field in self._shown:
            if field not in observation:
                raise ValueError(
                    f"observations of the OpenEnv server '{self._name}' have no '{field}': "
                    f"they have {', '.join(observation)}"
                )
        return "\n".join(filter(None, (_plain(observation[field]) for field in self._shown)))


class Tools:
    """One episode with the tools of a server.

    Args:
        server: its name in `.openenv.json`.
        reset: columns of the data row that are told to the server at the beginning, beside the seed.

    Raises:
        UserError: there is no such file or server, or its entry cannot be used.
    """

    def __init__(self, server: str, reset: Sequence[str] = ()) -> None:
        self._name, self._entry, self._columns = server, entry_of(server), reset
        self._session: Session

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin a session, with the seed and what is told of the row."""
        self._session, _ = await _begun(self._name, self._entry, _reset_arguments(self._columns, row, seed))

    async def answer(self, calls: Sequence[ToolCall], last: bool) -> Step:
        """Call the tools that a turn asks for, one after the other, until the server says that it is over.

        Raises:
            ConnectionError: the server is gone.
        """
        results, rewards, done = list[str | Failed](), list[float](), False
        for call in calls:
            if call.arguments is None:
                results.append(Failed("the arguments are no JSON object"))
                continue
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            answer = await self._session.ask("step", action)
            results.append(_result(answer["observation"]))
            rewards += [answer["reward"]] if answer.get("reward") is not None else []
            if done := bool(answer.get("done")):
                break
        return told(calls, results, done or last or not calls, math.fsum(rewards) if rewards else None)

    def schemas(self) -> list[dict[str, Any]]:
        """Return what a chat template is told of the tools; the server is asked once in this process.

        Raises:
            UserError: the server does not answer, or has no tools.
        """
        if self._name not in _schemas:
            try:
                _schemas[self._name] = asyncio.run(self._asked())
            except (ConnectionError, TimeoutError) as error:
                problem = str(error) or f"the OpenEnv server '{self._name}' does not answer within {ASKED_S:g} s"
                raise UserError(problem, f"start it by hand, as {FILE} says, to see what is wrong") from error
        return _schemas[self._name]

    async def _asked(self) -> list[dict[str, Any]]:
        async with started(self._name, self._entry) as server, asyncio.timeout(ASKED_S):
            _, answer = await begin(self._name, server, "step", {"type": "list_tools"})
        found = [_schema(self._name, tool) for tool in answer["observation"].get("tools", [])]
        if not found:
            raise UserError(
                f"the OpenEnv server '{self._name}' has no tools",
                "penstock.environments.openenv:Gym is for such servers",
            )
        return found


_schemas: dict[str, list[dict[str, Any]]] = {}  # of servers that have been asked, by name


async def _begun(name: str, entry: dict[str, Any], told: dict[str, Any]) -> tuple[Session, dict[str, Any]]:
    return await begin(name, await running(name, entry), "reset", told)


def _reset_arguments(columns: Sequence[str], row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of the server's `reset`; it leaves out those that its environment does not take."""
    for column in columns:
        if column not in row:
            raise ValueError(f"the data row has no column '{column}', which environment.settings names in 'reset'")
    return {"seed": seed % SEEDS, **{column: row[column] for column in columns}}


def _schema(name: str, tool: object) -> dict[str, Any]:
    match tool:
        case {"name": str(called), "description": str(description), "input_schema": dict(parameters)}:
            told = {"name": called, "description": description, "parameters": parameters}
            return {"type": "function", "function": told}
    raise ConnectionError(
        f"the OpenEnv server '{name}' lists a tool without a name, a description or a schema: {tool!r:.300}"
    )


def _result(observation: dict[str, Any]) -> str | Failed:
    """Return what a tool gave: the texts of an MCP result, or whatever else it is."""
    if observation.get("error"):
        return Failed(observation["error"]["message"])
    match observation.get("result"):
        case {"content": list(parts)}:
            return "\n".join(part["text"] for part in parts if part.get("type") == "text")
        case other:
            return _plain(other)


def _plain(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
