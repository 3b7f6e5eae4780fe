"""The server of the gateway: in a worker process, for the episodes that live there, on the loopback interface.

An agent's address has the key of its episode in it, which nobody else knows; it needs no other. What an episode asks
goes to the rollout engine with the worker's other answers (penstock/environments/worker.py), and whoever asks waits for
the turn, however long the engine has other work.

Requests of an episode that are there at the same time are drawn together, a round; those that come meanwhile are the
next one. So an episode has one call under way as others have, and what goes on from a turn can be told from what was
asked before it had ended.

Left out: what requests and answers look like (penstock/environments/gateway/requests.py).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.environments.gateway.asks import CUT, Ask, Turn
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
PASSES = 8  # of the event loop without anything new, after which an agent has asked what it asks at once
SERVED: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
}
LOOPBACK = "127.0.0.1"
GONE = "there is no such episode, or it is over"


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request that waits for its answer."""

    request: Request
    body: asyncio.Future[dict[str, Any]]

    def refuse(self, why: str) -> None:
        """Tell whoever asked that there is no answer, unless it has gone."""
        if not self.body.done():
            self.body.set_exception(Refused(why))

    def answer(self, choices: list[Turn], history: History) -> None:
        """Give the turns, which become part of the history also where whoever asked has gone."""
        try:
            body = self.request.answer(choices, history)
        except Refused as error:
            self.refuse(str(error))
            return
        if not self.body.done():
            self.body.set_result(body)


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
        self._new = asyncio.Event()
        self._next: list[_Asked] = []
        self._round: list[_Asked] = []
        self._waiting = 0
        self._over = self.cut = False
        self.refused = self.open = self.bytes_read = 0

    async def asked(self) -> list[Ask]:
        """Wait for what the agent asks next: a round, in the order in which its turns are drawn."""
        asks: list[Ask] = []
        while not asks:
            await self._new.wait()
            await self._all_arrived()
            self._new.clear()
            asks = self._begin_round()
        return asks

    async def _all_arrived(self) -> None:
        """Wait, without a clock, for what is on its way; requests of a thread or process may still come later.

        Of a long request a piece is as good as a request: one that stalls is waited for no longer than one that is not
        there.
        """
        known = (0, 0)
        while known != (there := (len(self._next), self.bytes_read)):
            known = there
            for _ in range(PASSES):
                await asyncio.sleep(0)

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
            asked.refuse(str(error))
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
            asked.refuse(choices[0].refused)
        self._round = []
        if last:
            self.cut |= bool(self._next)
            self._refuse_all()

    def close(self) -> None:
        """Answer nothing more."""
        self._gateway.sessions.pop(self._key, None)
        self._over = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for asked in [*self._round, *self._next]:
            asked.refuse(CUT)
        self._round, self._next = [], []

    async def serve(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request, once its turns have been taken.

        Raises:
            Refused: it is not answered.
        """
        request.refuse()
        if self._waiting + request.choices > WAITING:
            raise Refused(f"an episode may wait for {WAITING} turns at a time, and for {self._waiting} it does")
        if self._over:
            self.cut = True
            raise Refused(CUT)
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._next.append(asked)
        self._new.set()
        self._waiting += request.choices
        try:
            return await asked.body
        finally:
            self._waiting -= request.choices


class Gateway:
    """The endpoint of a worker process.

    Attributes:
        sessions: of the episodes under way, by key.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._socket = socket.create_server((LOOPBACK, 0), backlog=2048)
        self.address = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        routes = [Route(f"/{{key}}{path}", _handler(self, kind), methods=["POST"]) for path, kind in SERVED.items()]
        routes.append(Route("/{key}/v1/models", self._models))
        config = uvicorn.Config(
            Starlette(routes=routes), lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def started(self) -> Gateway:
        """Wait until it answers."""
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        return self

    def open(self, several: bool = False) -> Session:
        """Return the session of a new episode, of which `several` paths are learnt from, or one."""
        key = secrets.token_urlsafe(16)
        session = self.sessions[key] = Session(self, key, several)
        return session

    async def _models(self, request: HttpRequest) -> Response:
        if request.path_params["key"] not in self.sessions:
            return _error(404, GONE)
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "penstock"}]})


def _handler(gateway: Gateway, kind: type[Request]) -> Any:
    async def handle(request: HttpRequest) -> Response:
        session = gateway.sessions.get(request.path_params["key"])
        if session is None:
            return _error(404, GONE)
        session.open += 1
        try:
            asked = kind.model_validate_json(await _body(request, session))
            body = await session.serve(asked)
        except (ValidationError, Refused) as error:
            session.refused += not session.cut
            return _error(400, _said(error))
        finally:
            session.open -= 1
        if asked.stream and not isinstance(asked, GenerateRequest):  # which refuses it
            return StreamingResponse(stream_of(asked, body), media_type="text/event-stream")
        return JSONResponse(body)

    return handle


def _said(error: ValidationError | Refused) -> str:
    if isinstance(error, Refused):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}"


async def _body(request: HttpRequest, session: Session) -> bytes:
    """Read a request, unless so many of its episode are there that what they hold might have no end."""
    if session.open > WAITING:
        raise Refused(f"an episode may have {WAITING} requests at a time")
    body = bytearray()
    async for part in request.stream():
        body += part
        session.bytes_read += len(part)
        if len(body) > LARGEST_REQUEST:
            raise Refused(f"the request is larger than {LARGEST_REQUEST >> 20} MiB")
    return bytes(body)


def _error(status: int, text: str) -> Response:
    said = {"message": text, "type": "invalid_request_error", "param": None, "code": status}
    return JSONResponse({"error": said}, status)


_gateway: Gateway | None = None


async def gateway() -> Gateway:
    """Return this process's endpoint, started at the first call; of the event loop that asks first."""
    global _gateway
    if _gateway is None:
        _gateway = Gateway()
    return await _gateway.started()
