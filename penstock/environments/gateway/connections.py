"""Connections of the gateway: HTTP/1.1 between an agent and whoever answers it, without a task for a request.

Where the policy is small, what a request costs here is what an episode costs. So a request is a call of the event loop
for its bytes and one write for its answer; nothing waits in between. Answers go out in the order of their requests.

A connection that rests is closed after a while, since agents may leave one behind with every episode. Left out: who is
asked and what that means (penstock/environments/gateway/server.py), TLS and compression, which the loopback interface
does without.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, cast

import httptools

LARGEST_HEAD = 64 << 10  # bytes
BACKLOG = 2048  # connections that wait to be taken, as of all episodes of a process at once
RESTS_S = 5.0
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(eq=False)
class Answer:
    """What goes back for a request; nothing goes before it is there.

    Attributes:
        last: whether the connection ends with it.
        bare: whether its body is left out, as HEAD has it.
        allowed: the methods that the path takes, said where another was asked with; empty: nothing is said of them.
    """

    connection: Connection
    last: bool
    bare: bool = False
    allowed: tuple[str, ...] = ()
    data: bytes | None = None

    def give(self, status: int, body: bytes, kind: str = JSON) -> None:
        """Send it, once those before it have gone; whoever asked may have gone, too."""
        more = f"allow: {', '.join(self.allowed)}\r\n" if self.allowed else ""
        more += "connection: close\r\n" if self.last else ""
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
        self.data = f"{head}content-length: {len(body)}\r\n{more}\r\n".encode() + (b"" if self.bare else body)
        self.connection.send()


class Reader(Protocol):
    """Who reads the body of a request, and answers it: now or later, and once."""

    def read(self, part: bytes) -> None:
        """Take a part of it."""

    def ended(self) -> None:
        """Hear that all of it has come."""

    def left(self) -> None:
        """Hear that the rest of it will not come."""


Route = Callable[[str, str, Answer], Reader]  # of a method and a path


@dataclass(eq=False)
class Connections:
    """All that are open, and the clock that closes those that rest."""

    route: Route
    opened: set[Connection] = field(default_factory=set)

    def listen(self, listening: socket.socket) -> None:
        """Answer what comes to a socket; what comes earlier waits in its backlog."""
        loop = asyncio.get_running_loop()
        self._listening = loop.create_task(
            loop.create_server(lambda: Connection(self), sock=listening, backlog=BACKLOG)
        )
        self._look()

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in [*self.opened]:
            connection.close_if_rests(now - RESTS_S)
        asyncio.get_running_loop().call_later(RESTS_S / 2, self._look)


class Connection(asyncio.Protocol):
    """One of an agent's client; its methods without a sentence are asyncio's and httptools' callbacks."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._answers: deque[Answer] = deque()
        self._reading: Reader | None = None  # the body of the request that has begun last
        self._path, self._head, self._continues = b"", 0, False
        self._is_last = False  # whether the request that has begun last is the connection's last
        self._is_over = False  # whether what still comes is not read
        self._heard = asyncio.get_running_loop().time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)
        self._connections.opened.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        self._connections.opened.discard(self)
        self._leave()

    def _leave(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.left()

    def close_if_rests(self, since: float) -> None:
        """Close it, if nothing has come since then, nothing is being read for anybody and nobody is to be answered."""
        if self._heard < since and self._reading is None and not self._answers:
            self._transport.close()

    def send(self) -> None:
        """Write the answers that are there, in the order of their requests."""
        gone = self._transport.is_closing()
        while self._answers and (answer := self._answers[0]).data is not None:
            self._answers.popleft()
            self._heard = asyncio.get_running_loop().time()
            if not gone:
                self._transport.write(answer.data)
            if answer.last:
                self._transport.close()
                return

    # ---- requests --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._heard = asyncio.get_running_loop().time()
        if self._is_over:
            return
        self._head += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserCallbackError, httptools.HttpParserUpgrade) as error:
            if not isinstance(error, httptools.HttpParserUpgrade):  # which is refused by answering and closing
                raise
        except httptools.HttpParserError as error:
            self._malformed(f"this is not HTTP/1.1: {error}")
        if self._reading is None and self._head > LARGEST_HEAD:
            self._malformed(f"the request's head is larger than {LARGEST_HEAD >> 10} KiB")

    def _malformed(self, why: str) -> None:
        """Say so behind the answers that are due; of a request that is being read this is the answer."""
        if self._is_over:
            return  # it came behind the last request
        self._is_over = True
        being_read = self._reading is not None and self._answers and self._answers[-1].data is None
        answer = self._answers[-1] if being_read else Answer(self, True)
        if not being_read:
            self._answers.append(answer)
        self._leave()
        answer.last = True
        answer.give(400, why.encode(), "text/plain")

    def on_message_begin(self) -> None:  # noqa: D102
        self._path, self._continues = b"", False

    def on_url(self, url: bytes) -> None:  # noqa: D102
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        self._continues |= name.lower() == b"expect" and value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:  # noqa: D102
        method, path = self._parser.get_method().decode(), self._path.partition(b"?")[0].decode(errors="replace")
        parser = self._parser
        self._is_last = not parser.should_keep_alive() or parser.should_upgrade() or parser.get_http_version() == "1.0"
        answer = Answer(self, self._is_last, bare=method == "HEAD")
        self._answers.append(answer)
        self._reading = self._connections.route(method, path, answer)
        if self._continues and answer.data is None and len(self._answers) == 1:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:  # noqa: D102
        if self._reading is not None:
            self._reading.read(body)

    def on_message_complete(self) -> None:  # noqa: D102
        reading, self._reading, self._head = self._reading, None, 0
        self._is_over = self._is_last
        if reading is not None:
            reading.ended()

    # ---- a client that does not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:  # noqa: D102
        self._transport.pause_reading()

    def resume_writing(self) -> None:  # noqa: D102
        self._transport.resume_reading()
