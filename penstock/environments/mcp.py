"""Tools of MCP servers, by the names that `.mcp.json` in the working folder gives them; a reward section judges.

    {"mcpServers": {"search": {"command": "my-search-server", "args": ["--quick"], "env": {"REGION": "eu"}},
                    "files": {"url": "http://127.0.0.1:9000/mcp"}}}

A worker process has one connection to each, which its episodes share: what a server keeps between calls is not
an episode's own. A server that is gone fails the episodes that ask it, and the next episode connects anew.

Left out: resources and prompts of servers, results that are no text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import UserError
from penstock.environments.environment import Step, ToolCall
from penstock.environments.named import NamedIn
from penstock.environments.tools import Failed, told

FILE = ".mcp.json"
IN = NamedIn(FILE, "mcpServers", "MCP server", '{"command": "...", "args": []}')


@dataclass(frozen=True)
class Connection:
    """A server that answers, and its tools by name."""

    client: Any
    tools: dict[str, Any]
    keeper: asyncio.Task[None]


class Servers:
    """One episode with the tools of some servers.

    Args:
        names: of servers in `.mcp.json`.

    Raises:
        UserError: there is no such file or server, or its entry says neither what to run nor where it is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._servers = {name: _server(name) for name in names}

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Connect to the servers that this process is not connected to."""
        for name in self._servers:
            await self._connection(name)

    async def answer(self, calls: Sequence[ToolCall], last: bool) -> Step:
        """Call the tools that a turn asks for, one after the other.

        Raises:
            ConnectionError: a server is gone.
        """
        return told(calls, [await self._called(call) for call in calls], last or not calls, None)

    def schemas(self) -> list[dict[str, Any]]:
        """Return what a chat template is told of the tools; the servers are asked once in this process.

        Raises:
            UserError: a server does not answer, or two have a tool of one name.
        """
        key = json.dumps(self._servers, sort_keys=True)
        if key not in _told:
            _told[key] = asyncio.run(self._schemas())
        return _told[key]

    async def _schemas(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, server in self._servers.items():
            try:
                async with _client(server) as client:
                    tools = await _tools(client)
            except Exception as error:  # of the library, of the system, or a group of both
                raise UserError(
                    f"the MCP server '{name}' of {FILE} does not answer: {_said(error)}",
                    "start it by hand, as the file says, to see what is wrong",
                ) from error
            if twice := found.keys() & tools.keys():
                raise UserError(
                    f"two MCP servers have a tool '{min(twice)}', one of them '{name}'", "name one of the servers alone"
                )
            found |= {tool: _schema(told) for tool, told in tools.items()}
        return [*found.values()]

    async def _connection(self, name: str) -> Connection:
        return await _connected(name, self._servers[name])

    async def _called(self, call: ToolCall) -> str | Failed:
        for name in self._servers:
            connection = await self._connection(name)
            if call.name not in connection.tools:
                continue
            if call.arguments is None:
                return Failed("the arguments are no JSON object")
            try:
                result = await connection.client.call_tool(call.name, call.arguments)
            except Exception as error:
                _open.pop(name, None)
                connection.keeper.cancel()
                raise ConnectionError(f"the MCP server '{name}' is gone: {_said(error)}") from error
            text = "\n".join(part.text for part in result.content if part.type == "text")
            return Failed(text) if result.is_error else text
        return Failed(f"there is no tool '{call.name}'")


_told: dict[str, list[dict[str, Any]]] = {}  # of servers that have been asked, by what the file says of them
_open: dict[str, asyncio.Future[Connection]] = {}  # of this process, by the server's name


async def _connected(name: str, server: Mapping[str, Any]) -> Connection:
    """Return the connection to a server, made where there is none; it lasts until the server or the process ends."""
    if name not in _open:
        loop = asyncio.get_running_loop()
        _open[name] = made = loop.create_future()
        keeper = loop.create_task(_keep(server, made))
        keeper.add_done_callback(lambda _: _forget(name, made))
    return await asyncio.shield(_open[name])


def _forget(name: str, made: asyncio.Future[Connection]) -> None:
    if _open.get(name) is made:
        del _open[name]


async def _keep(server: Mapping[str, Any], made: asyncio.Future[Connection]) -> None:
    """Hold a connection: the library wants it closed by the task that has opened it."""
    keeper = asyncio.current_task()
    assert keeper is not None
    try:
        async with _client(server) as client:
            made.set_result(Connection(client, await _tools(client), keeper))
            await asyncio.Event().wait()
    except Exception as error:
        if not made.done():
            made.set_exception(ConnectionError(f"the MCP server does not answer: {_said(error)}"))


def _client(server: Mapping[str, Any]) -> Any:
    """Return a client that is not connected yet.

    Raises:
        UserError: the library is absent, or too old.
    """
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise UserError(
            f"MCP servers need the package mcp, version 2 or later: {error}", "pip install 'mcp>=2,<3'"
        ) from error
    if "url" in server:
        return Client(server["url"])
    return Client(StdioServerParameters(command=server["command"], args=server.get("args", []), env=server.get("env")))


async def _tools(client: Any) -> dict[str, Any]:
    """Return all tools of a server by name, page by page."""
    found, cursor = dict[str, Any](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        found |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            return found


def _schema(tool: Any) -> dict[str, Any]:
    told = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": told}


def _server(name: str) -> dict[str, Any]:
    server = IN.entry(name)
    if ("url" in server) == ("command" in server):
        raise UserError(f"the MCP server '{name}' of {FILE} needs either 'command' or 'url'", "correct its entry")
    return server


def _said(error: BaseException) -> str:
    """Return what went wrong; of a group of errors the first one's words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
