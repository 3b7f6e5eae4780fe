"""The server of the gateway: in a worker process, for the episodes that live there, on the loopback interface.

An agent's address has the key of its episode in it, which nobody else knows; it needs no other. What an episode asks
goes to the rollout engine with the worker's other answers (penstock/environments/worker.py), and whoever asks waits for
the turn, however long the engine has other work.

Requests of an episode that are there at the same time are drawn together, a round; those that come meanwhile are the
next one. So an episode has one call under way as others have, and what goes on from a turn can be told from what was
asked before it had ended.

Left out: what requests and answers look like (penstock/environments/gateway/requests.py), and HTTP
(penstock/environments/gateway/connections.py).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.environments.gateway.asks import CUT, Ask, Turn
from penstock.environments.gateway.connections import BACKLOG, EVENTS, Answer, Connections, Reader
from penstock.environments.gateway.history import History, Refused
from penstock.environments.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Request,
    stream_of,
)

LARGEST_REQUEST = 16 << 20  # bytes
WAITING = 64  # requests of an episode at a time, and turns that it may wait for
PASSES = 16  # of the event loop since anything new, after which an agent has asked what it asks at once
SERVED: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
}
MODELS = "/v1/models"
METHODS: dict[str, tuple[str, ...]] = {**dict.fromkeys(SERVED, ("POST",)), MODELS: ("GET", "HEAD")}
LOOPBACK = "127.0.0.1"
GONE = "there is no such episode, or it is over"

_told = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_models = _told({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "penstock"}]}).encode()


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request that waits for its answer; whoever gets one may have gone."""

    request: Request
    answered: Callable[[dict[str, Any]], None]
    refused: Callable[[str], None]

    def answer(self, choices: list[Turn], history: History) -> None:
        """Give the turns, which become part of the history."""
        try:
            body = self.request.answer(choices, history)
        except Refused as error:
            self.refused(str(error))
            return
        self.answered(body)


class Session:
    """What an episode's agent asks and what it gets; of one event loop.

    Attributes:
        cut: whether it asked for more turns than it could have.
        refused: requests that got no turn, though the episode was not at its end.
        open: requests that are being read, or wait.
        bytes_read: of all its requests.
    """

    def __init__(self, gateway: Gateway, key: str, several: bool) -> None:
        self.url = f"{gateway.address}/{key}/v1"
        self.history = History(several)
        self._gateway, self._key = gateway, key
        self._next: list[_Asked] = []
        self._round: list[_Asked] = []
        self._waiting = 0
        self._over = self._ended = self.cut = False
        self._arrived: asyncio.Future[None] | None = None  # whoever waits for what is asked next
        self._known, self._passes = (0, 0), 0
        self.refused = self.open = self.bytes_read = 0
        self.reading: set[_Read] = set()  # requests whose bodies have not come

    async def asked(self) -> list[Ask]:
        """Wait for what the agent asks next: a round, in the order in which its turns are drawn; none: it has ended."""
        asks: list[Ask] = []
        while not (asks or self._ended):
            self._arrived = asyncio.get_running_loop().create_future()
            if self._next:
                self._look()
            await self._arrived
            asks = [] if self._ended else self._begin_round()
        return asks

    def end(self) -> None:
        """Let nobody wait for what is asked next: the agent has ended."""
        self._ended = True
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _look(self) -> None:
        """Begin to wait, without a clock, for what is on its way; what a thread or process asks may still come later.

        Of a long request a piece is as good as a request: one that stalls is waited for no longer than one that is not
        there.
        """
        self._known = (0, 0)
        self._pass()

    def _pass(self) -> None:
        there = (len(self._next), self.bytes_read)
        self._passes = 0 if there != self._known else self._passes + 1
        self._known = there
        if self._arrived is None or self._arrived.done():
            return
        if self._passes < PASSES:
            asyncio.get_running_loop().call_soon(self._pass)
        else:
            self._arrived.set_result(None)

    def _begin_round(self) -> list[Ask]:
        """Return what is asked, in an order that is not that of arrival.

        At most one request follows the turn before, unless several paths are learnt from.
        """
        arrived, self._next, self._round = self._next, [], []
        found = [(asked, ask) for asked in arrived if (ask := self._ask(asked, self.history)) is not None]
        if len(found) > 1:
            found.sort(key=lambda item: (not item[1].follows, repr(item[1])))
        asks: list[Ask] = []
        for number, (asked, ask) in enumerate(found):
            alone = number and ask.follows and not self.history.several
            whole = self._ask(asked, History()) if alone else ask
            assert whole is not None
            self._round.append(asked)
            asks.append(whole)
        return asks

    def _ask(self, asked: _Asked, history: History) -> Ask | None:
        try:
            return asked.request.ask(history)
        except Refused as error:
            asked.refused(str(error))
            return None

    def answer(self, turns: list[list[Turn]], last: bool) -> None:
        """Give the agent the turns of its round.

        Args:
            turns: of each request the choices.
            last: whether it gets no others.
        """
        self._over = last
        for asked, choices in zip(self._round, turns, strict=True):
            if choices[0].refused is None:
                asked.answer(choices, self.history)
                continue
            self.cut |= last
            asked.refused(choices[0].refused)
        self._round = []
        if last:
            self.cut |= bool(self._next)
            self._refuse_all()

    def close(self) -> None:
        """Answer nothing more."""
        self._gateway.sessions.pop(self._key, None)
        self._over = True
        self._refuse_all()
        for one in [*self.reading]:
            one.give_up(GONE)

    def _refuse_all(self) -> None:
        for asked in [*self._round, *self._next]:
            asked.refused(CUT)
        self._round, self._next = [], []

    def ask(self, asked: _Asked) -> None:
        """Take a request, which is answered once its turns have been taken.

        Raises:
            Refused: it is not answered.
        """
        request = asked.request
        request.refuse()
        if self._waiting + request.choices > WAITING:
            raise Refused(f"an episode may wait for {WAITING} turns at a time, and for {self._waiting} it does")
        if self._over:
            self.cut = True
            raise Refused(CUT)
        self._next.append(asked)
        self._waiting += request.choices
        if self._arrived is not None and not self._arrived.done() and len(self._next) == 1:
            self._look()

    def left(self, request: Request) -> None:
        """Count a request that has its answer no longer."""
        self._waiting -= request.choices


class Gateway:
    """The endpoint of a worker process.

    Attributes:
        sessions: of the episodes under way, by key.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._socket = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.address = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        self._connections = Connections(self._route)
        self._connections.listen(self._socket)

    def open(self, several: bool = False) -> Session:
        """Return the session of a new episode, of which `several` paths are learnt from, or one."""
        key = secrets.token_urlsafe(16)
        session = self.sessions[key] = Session(self, key, several)
        return session

    def _route(self, method: str, path: str, answer: Answer) -> Reader:
        key, _, rest = path.removeprefix("/").partition("/")
        session, place = self.sessions.get(key), f"/{rest}"
        if session is None:
            return _Told(answer, 404, _error(404, GONE))
        if place not in METHODS:
            return _Told(answer, 404, _error(404, f"{place} is not served, but {', '.join(METHODS)}"))
        if method not in METHODS[place]:
            answer.allowed = METHODS[place]
            return _Told(answer, 405, _error(405, f"{place} takes {' and '.join(METHODS[place])}, not {method}"))
        return _Told(answer, 200, _models) if place == MODELS else _Read(session, SERVED[place], answer)


@dataclass(eq=False)
class _Told:
    """A request that has the same answer whatever it brings."""

    answer: Answer
    status: int
    said: bytes

    def read(self, part: bytes) -> None:
        pass

    def ended(self) -> None:
        self.answer.give(self.status, self.said)

    def left(self) -> None:
        pass


@dataclass(eq=False)
class _Read:
    """A request of an episode: read, asked, answered."""

    session: Session
    kind: type[Request]
    answer: Answer
    body: bytearray = field(default_factory=bytearray)
    asked: Request | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.session.open += 1
        self.session.reading.add(self)
        if self.session.open > WAITING:  # what they hold might have no end
            self._refuse(f"an episode may have {WAITING} requests at a time")

    def read(self, part: bytes) -> None:
        if self.is_over:
            return
        self.body += part
        self.session.bytes_read += len(part)
        if len(self.body) > LARGEST_REQUEST:
            self._refuse(f"the request is larger than {LARGEST_REQUEST >> 20} MiB")

    def ended(self) -> None:
        if self.is_over:
            return
        self.session.reading.discard(self)
        try:
            asked = self.kind.model_validate_json(self.body)
            self.session.ask(_Asked(asked, self._answer, self._refuse))
            self.asked = asked
        except (ValidationError, Refused) as error:
            self._refuse(_said(error))
        finally:
            self.body = bytearray()

    def left(self) -> None:
        if not self.is_over:
            self._end()

    def give_up(self, why: str) -> None:
        """Wait for the rest of the body no longer."""
        self.answer.last = True
        self._refuse(why)

    def _answer(self, body: dict[str, Any]) -> None:
        asked = self.asked
        self._end()
        if isinstance(asked, (ChatRequest, CompletionRequest)) and asked.stream:
            self.answer.give(200, "".join(stream_of(asked, body)).encode(), EVENTS)
        else:
            self.answer.give(200, _told(body).encode())

    def _refuse(self, why: str) -> None:
        if self.is_over:
            return
        self.session.refused += not self.session.cut
        self._end()
        self.answer.give(400, _error(400, why))

    def _end(self) -> None:
        self.is_over, self.body = True, bytearray()
        self.session.open -= 1
        self.session.reading.discard(self)
        if self.asked is not None:
            self.session.left(self.asked)


def _said(error: ValidationError | Refused) -> str:
    if isinstance(error, Refused):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}"


def _error(status: int, text: str) -> bytes:
    said = {"message": text, "type": "invalid_request_error", "param": None, "code": status}
    return _told({"error": said}).encode()


_gateway: Gateway | None = None


def gateway() -> Gateway:
    """Return this process's endpoint, started at the first call; of the event loop that asks first."""
    global _gateway
    if _gateway is None:
        _gateway = Gateway()
    return _gateway
