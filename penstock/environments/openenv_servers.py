"""OpenEnv servers: which there are, starting them, and the session that an episode has with one.

`.openenv.json` in the working folder says what the servers are:

    {"servers": {"echo": {"command": "/envs/echo/bin/python", "args": ["-m", "echo.server.app", "--port", "{port}"],
                          "env": {"WORKERS": "1"}},
                 "chess": {"url": "ws://127.0.0.1:8000"}}}

A server with a `command` is started once in a process, below a keeper, with which it ends; its port is a free one, put
where `{port}` stands. It gets few variables of ours, as it may run what a model writes, and has to listen on the
loopback interface alone. One that has died is started anew for the next episode.

The library of OpenEnv wants other versions of much that vLLM brings, so its messages are spoken here: JSON over a
WebSocket, one answer to each. Left out: its HTTP interface, what a `state` message tells, containers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from penstock.base.errors import UserError
from penstock.environments.named import NamedIn
from penstock.usercode.kept import command_of, unread

FILE = ".openenv.json"
PORT = "{port}"
IN = NamedIn(FILE, "servers", "OpenEnv server", f'{{"command": "...", "args": ["--port", "{PORT}"]}}')
MOST_BYTES = 1 << 20  # of a message of a server
MOST_SAID = 300  # characters of what a server said that an error repeats
KEPT_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER")
LOOK_S = 0.1
START_S = 120.0  # for a server to listen, once it was started
PATIENCE_S = 5.0  # with a server whose sessions are all taken: it may be about to end some
TOO_BIG = 1009  # WebSocket's code


class Refused(ConnectionError):
    """A server answered with an error.

    Attributes:
        code: OpenEnv's.
        kinds: where it refused an action, what kinds of mistakes it found there.
    """

    def __init__(self, name: str, told: Mapping[str, Any]) -> None:
        mistakes = [item for item in told.get("errors") or [] if isinstance(item, dict)]
        where = [f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg')}" for item in mistakes]
        self.code = str(told.get("code"))
        self.kinds = {item.get("type") for item in mistakes}
        self.said = "; ".join([str(told.get("message")), *where])[:MOST_SAID]
        super().__init__(f"the OpenEnv server '{name}' refuses ({self.code}): {self.said}")


@dataclass(frozen=True)
class Server:
    """A server that this process may talk to.

    Attributes:
        process: its keeper; None where it was not started here.
    """

    url: str
    process: asyncio.subprocess.Process | None = None


class Session:
    """An episode's own connection to a server, which ends with this object: nobody tells an episode of its end."""

    def __init__(self, name: str, connection: ClientConnection) -> None:
        self._name, self._connection = name, connection
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _drop, loop, connection.transport).atexit = False

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return what an observation of the answer is: `observation`, `reward`, `done`.

        Raises:
            Refused: the server answers with an error.
            ConnectionError: it is gone, or answers with something else.
        """
        try:
            with suppress(ConnectionClosed):  # what it said before it closed is still to be read
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            text = await self._connection.recv()
        except ConnectionClosed as error:
            raise ConnectionError(self._why(error)) from error
        return self._read(text)

    def _why(self, error: ConnectionClosed) -> str:
        if error.sent is not None and error.sent.code == TOO_BIG:
            return f"the OpenEnv server '{self._name}' sent more than {MOST_BYTES:,} bytes in one message"
        return f"the OpenEnv server '{self._name}' is gone: {error}"

    def _read(self, text: str | bytes) -> dict[str, Any]:
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        match message:
            case {"type": "observation", "data": {"observation": dict()} as data}:
                return dict(data)
            case {"type": "error", "data": dict(told)}:
                raise Refused(self._name, told)
        said = repr(text[:MOST_SAID])
        raise ConnectionError(f"the OpenEnv server '{self._name}' answers with no message of OpenEnv's: {said}")


def _drop(loop: asyncio.AbstractEventLoop, transport: asyncio.BaseTransport) -> None:
    """Close a connection from whichever thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(transport.close)


async def begin(name: str, server: Server, kind: str, data: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
    """Return a new session with a server, and the answer to its first message.

    Raises:
        ConnectionError: the server does not answer, or has no session left.
    """
    loop = asyncio.get_running_loop()
    patient_until = loop.time() + PATIENCE_S
    while True:
        session = await _session(name, server)
        try:
            return session, await session.ask(kind, data)
        except Refused as error:
            if error.code != "CAPACITY_REACHED" or loop.time() > patient_until:
                raise
        await asyncio.sleep(LOOK_S)


async def _session(name: str, server: Server) -> Session:
    try:
        proxy: Literal[True] | None = True if server.process is None else None
        return Session(name, await connect(f"{server.url}/ws", max_size=MOST_BYTES, proxy=proxy, ping_timeout=None))
    except (OSError, WebSocketException) as error:
        raise ConnectionError(
            f"the OpenEnv server '{name}' does not answer: {type(error).__name__}: {error}"
        ) from error


# ---- the servers of this process -----------------------------------------------------------------------------------

_running: dict[str, asyncio.Future[Server]] = {}  # those that were started, by name


async def running(name: str, entry: Mapping[str, Any]) -> Server:
    """Return a server, started where that has to be; it lasts until it dies or this process ends.

    Raises:
        ConnectionError: it does not start.
    """
    if "url" in entry:
        return Server(_websocket(entry["url"]))
    if name not in _running:
        loop = asyncio.get_running_loop()
        _running[name] = made = loop.create_future()
        keeper = loop.create_task(_keep(name, entry, made))
        keeper.add_done_callback(lambda _: _forget(name, made))
    return await asyncio.shield(_running[name])


def _forget(name: str, made: asyncio.Future[Server]) -> None:
    if _running.get(name) is made:
        del _running[name]


async def _keep(name: str, entry: Mapping[str, Any], made: asyncio.Future[Server]) -> None:
    try:
        async with started(name, entry) as server:
            made.set_result(server)
            assert server.process is not None
            await server.process.wait()
    except Exception as error:
        if not made.done():
            made.set_exception(error)


@asynccontextmanager
async def started(name: str, entry: Mapping[str, Any]) -> AsyncIterator[Server]:
    """Have a server within the block: started, or what its `url` says.

    Raises:
        ConnectionError: it ends at once, does not listen in time, or others than this machine reach it.
    """
    if "url" in entry:
        yield Server(_websocket(entry["url"]))
        return
    said = bytearray()
    with _port() as port:
        process = await _start(name, entry, port)
        reader = asyncio.get_running_loop().create_task(_listen_to(process, said))
        try:
            if problem := await _obstacle(name, process, port):
                raise ConnectionError(f"the OpenEnv server '{name}' {problem}: {_end(said)}")
            yield Server(f"ws://127.0.0.1:{port}", process)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            reader.cancel()


async def _obstacle(name: str, process: asyncio.subprocess.Process, port: int) -> str:
    """Wait until a server listens; return why it does not, nothing where it does."""
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while not _listens(name, process, port):
        if process.returncode is not None:
            return f"ends at its start (exit code {process.returncode})"
        if loop.time() > until:
            return f"does not listen on port {port} within {START_S:g} s"
        await asyncio.sleep(LOOK_S)
    return ""


async def _start(name: str, entry: Mapping[str, Any], port: int) -> asyncio.subprocess.Process:
    program = shutil.which(entry["command"])
    if program is None:
        raise ConnectionError(f"the OpenEnv server '{name}': there is no program '{entry['command']}'")
    words = [program, *(word.replace(PORT, str(port)) for word in entry.get("args", []))]
    given = {key: value.replace(PORT, str(port)) for key, value in entry.get("env", {}).items()}
    kept = {key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ}
    with unread() as descriptor:
        return await asyncio.create_subprocess_exec(
            *command_of(words, [descriptor]),
            env=kept | given,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


async def _listen_to(process: asyncio.subprocess.Process, said: bytearray) -> None:
    """Keep the end of what a server prints."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(1 << 16):
        said += chunk
        del said[:-MOST_SAID]


def _end(said: bytearray) -> str:
    return " ".join(said.decode(errors="replace").split()) or "it said nothing"


def _listens(name: str, keeper: asyncio.subprocess.Process, port: int) -> bool:
    """Return whether a server listens on its port: it itself, as another process may have been given the same.

    Raises:
        ConnectionError: it does so on an address that others than this machine reach.
    """
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for process in psutil.Process(keeper.pid).children(recursive=True):
            for door in process.net_connections("tcp"):
                if door.status != psutil.CONN_LISTEN or door.laddr.port != port:
                    continue
                if not ipaddress.ip_address(door.laddr.ip).is_loopback:
                    raise ConnectionError(
                        f"the OpenEnv server '{name}' listens on {door.laddr.ip}, which others reach: "
                        f"have it listen on 127.0.0.1 in {FILE} (--host 127.0.0.1)"
                    )
                return True
    return False


@contextmanager
def _port() -> Iterator[int]:
    """Give a free port, and keep it from others than a server that may reuse an address, as nearly all do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def _websocket(url: str) -> str:
    """Return the address as a WebSocket's, as OpenEnv's own clients take it.

    >>> _websocket("https://example.org/chess/")
    'wss://example.org/chess'
    """
    for plain, socketed in (("http://", "ws://"), ("https://", "wss://")):
        if url.startswith(plain):
            url = socketed + url.removeprefix(plain)
    return url.rstrip("/")


# ---- the file ------------------------------------------------------------------------------------------------------


def entry_of(name: str) -> dict[str, Any]:
    """Return what the file in the working folder says of a server.

    Raises:
        UserError: there is no such file or server, or its entry cannot be used.
    """
    entry = IN.entry(name)
    if ("url" in entry) == ("command" in entry):
        raise UserError(f"the OpenEnv server '{name}' of {FILE} needs either 'command' or 'url'", "correct its entry")
    if "command" in entry and not any(
        PORT in word for word in (*entry.get("args", []), *entry.get("env", {}).values())
    ):
        raise UserError(
            f"the OpenEnv server '{name}' of {FILE} is not told its port",
            f"write {PORT} where the port belongs in its 'args' or 'env', for instance \"--port\", \"{PORT}\"",
        )
    return entry
