"""The server of the gateway: in a worker process, for the episodes that live there, on the loopback interface.

An agent's address has the key of its episode in it, which nobody else knows; it needs no other. Requests of an episode
are answered one after the other, those of all episodes at once: what an episode asks goes to the rollout engine with
the worker's other answers (penstock/environments/worker.py), and whoever asks waits for the turn, however long the
engine has other work.

Left out: what requests and answers look like (penstock/environments/gateway/requests.py).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.environments.gateway.asks import Ask, Turn
from penstock.environments.gateway.history import History, Refused
from penstock.environments.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Request,
    stream_of,
)

LARGEST_REQUEST = 16 << 20  # bytes
WAITING = 64  # requests of an episode
SERVED: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
}
LOOPBACK = "127.0.0.1"
GONE = "there is no such episode, or it is over"
CUT = "the episode is cut: it has had all its turns, or its maximum context length"  # harnesses look for the last words


class Session:
    """What an episode's agent asks and what it gets; of one event loop.

    Attributes:
        cut: whether it asked for more turns than it could have.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self.url = f"{gateway.address}/{key}/v1"
        self.history = History()
        self._gateway, self._key = gateway, key
        self._asks: asyncio.Queue[Ask] = asyncio.Queue()
        self._turn: asyncio.Future[Turn] | None = None
        self._one = asyncio.Lock()
        self._waiting = 0
        self._over = self.cut = False

    async def asked(self) -> Ask:
        """Wait for what the agent asks next."""
        return await self._asks.get()

    def answer(self, turn: Turn, last: bool) -> None:
        """Give the agent its turn.

        Args:
            last: whether it gets no other.
        """
        self._over = last
        self.cut |= last and turn.refused is not None
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(turn)

    def close(self) -> None:
        """Answer nothing more."""
        self._gateway.sessions.pop(self._key, None)
        self._over = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(Turn(refused=CUT))

    async def serve(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request, once its turn has been taken.

        Raises:
            Refused: it is not answered.
        """
        request.refuse()
        if self._waiting == WAITING:
            raise Refused(f"{WAITING} requests of this episode wait already")
        self._waiting += 1
        try:
            async with self._one:
                return await self._serve(request)
        finally:
            self._waiting -= 1

    async def _serve(self, request: Request) -> dict[str, Any]:
        if self._over:
            self.cut = True
            raise Refused(CUT)
        ask = request.ask(self.history)
        self._turn = asyncio.get_running_loop().create_future()
        self._asks.put_nowait(ask)
        turn = await asyncio.shield(self._turn)  # who hangs up leaves its turn to the history of nobody
        if turn.refused is not None:
            raise Refused(turn.refused)
        return request.answer(turn, self.history)


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

    def open(self) -> Session:
        """Return the session of a new episode."""
        key = secrets.token_urlsafe(16)
        session = self.sessions[key] = Session(self, key)
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
        try:
            asked = kind.model_validate_json(await _body(request))
            body = await session.serve(asked)
        except ValidationError as error:
            first = error.errors()[0]
            return _error(400, f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}")
        except Refused as error:
            return _error(400, str(error))
        if asked.stream and not isinstance(asked, GenerateRequest):  # which refuses it
            return StreamingResponse(stream_of(asked, body), media_type="text/event-stream")
        return JSONResponse(body)

    return handle


async def _body(request: HttpRequest) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
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
