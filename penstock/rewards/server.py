"""Requests to a server that speaks OpenAI's API: many at a time, repeated where that may help, each with a deadline.

Why OpenAI's client: vLLM brings it along, it retries with growing pauses and heeds `Retry-After`. A request that
failed for good is a value (`Failed`), as a failed call of a reward function is. Once more samples are lost than the
training tolerates, nothing further is asked: the outcome is certain, and a dead server would otherwise be waited for
with every request anew.

Left out: what is asked (penstock/rewards/judge.py, penstock/rewards/service.py), streaming, several servers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.base.errors import UserError
from penstock.configs.sections.reward_servers import RewardServer
from penstock.rewards.types import NO_REPLY

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_KEY = "none"  # the client insists on one, and would take it from OPENAI_API_KEY, which is meant for other servers
LONGEST_PAUSE_S = 8.0  # between attempts, the client's own
LONGEST_REASON = 300
NOT_ASKED = "not asked any more: too many samples had failed before"

T = TypeVar("T")
Server = TypeVar("Server", bound=RewardServer)


@dataclass(frozen=True)
class Failed:
    """Why there is no answer for a sample."""

    reason: str


class RequestFailed(Exception):
    """A request ended without a usable answer, after all attempts; `status` is that of HTTP, None without a reply."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


Post = Callable[[str, dict[str, Any]], Awaitable[Any]]
Ask = Callable[[Post, range], Awaitable[list[T | Failed]]]


def ask_all(
    server: RewardServer, concurrency: int, ask: Ask[T], chunks: Sequence[range], tolerated: float
) -> list[T | Failed]:
    """Ask for every chunk of samples, `concurrency` chunks at a time; return one answer per sample, in order.

    Args:
        ask: gets a function that posts (path, JSON body) and returns the JSON reply, and the chunk; it returns one
            answer per sample of the chunk. A `RequestFailed` in it fails the whole chunk.
        tolerated: once more samples than this have failed, the others fail without being asked.
    """
    return asyncio.run(_ask_all(server, concurrency, ask, chunks, tolerated))


async def _ask_all(
    server: RewardServer, concurrency: int, ask: Ask[T], chunks: Sequence[range], tolerated: float
) -> list[T | Failed]:
    turns, lost = asyncio.Semaphore(concurrency), 0
    key = api_key(server)
    async with _client(server, key) as client:

        async def post(path: str, body: dict[str, Any]) -> Any:
            return await _reply(client.post(path, cast_to=object, body=body), server, key)

        async def one(chunk: range) -> list[T | Failed]:
            nonlocal lost
            async with turns:
                if lost > tolerated:
                    return [Failed(NOT_ASKED)] * len(chunk)
                try:
                    answers = await ask(post, chunk)
                except RequestFailed as error:
                    answers = [Failed(str(error))] * len(chunk)
                lost += sum(isinstance(answer, Failed) for answer in answers)
                return answers

        return [answer for answers in await asyncio.gather(*map(one, chunks)) for answer in answers]


def offered_models(server: RewardServer) -> list[str]:
    """Return the names of the models that the server offers.

    Raises:
        RequestFailed: it does not answer, or not in the form of OpenAI's API.
        UserError: the API key is not in the environment.
    """

    async def ask() -> list[str]:
        key = api_key(server)
        async with _client(server, key) as client:
            reply = await _reply(client.get("/v1/models", cast_to=object), server, key)
        try:
            return [str(model["id"]) for model in reply["data"]]
        except (LookupError, TypeError):
            raise RequestFailed(f"unexpected reply: {_short(str(reply))}") from None

    return asyncio.run(ask())


def check_server(key: str, server: RewardServer) -> None:
    """Check that a server answers and offers the configured model.

    Raises:
        UserError: it does not; `key` is the section's name, for the message.
    """
    try:
        offered = offered_models(patient_once(server))
    except RequestFailed as error:
        raise UserError(
            f"{key}.url: {server.url} does not answer as a server with OpenAI's API: {error}",
            "start it (penstock serve FOLDER), or correct the address or the key",
        ) from None
    if server.model not in offered:
        names = ", ".join(f"'{name}'" for name in offered[:5]) or "no model"
        raise UserError(
            f"{key}.model: {server.url} does not offer '{server.model}'; it offers {names}",
            f"correct {key}.model, or serve the model under this name: penstock serve FOLDER --name {server.model}",
        )


def patient_once(server: Server) -> Server:
    """Return the server's section with one further attempt only: whoever starts a training waits for the answer."""
    return server.model_copy(update={"retries": min(1, server.retries)})


def api_key(server: RewardServer) -> str:
    """Return the server's API key.

    Raises:
        UserError: the environment has none.
    """
    if server.api_key_env is None:
        return NO_KEY
    if not (key := os.environ.get(server.api_key_env)):
        raise UserError(
            f"the API key of {server.url} is not set: the environment has no {server.api_key_env}",
            f"export {server.api_key_env}=... where the flow runs, or correct 'api_key_env'",
        )
    return key


def _client(server: RewardServer, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    root = server.url.rstrip("/").removesuffix("/v1")
    return AsyncOpenAI(base_url=root, api_key=key, timeout=server.timeout_s, max_retries=server.retries)


async def _reply(request: Awaitable[Any], server: RewardServer, key: str) -> Any:
    """Await a reply; its deadline covers all attempts, since the client's own is of each read."""
    from openai import APIStatusError, OpenAIError

    deadline_s = (server.retries + 1) * server.timeout_s + server.retries * LONGEST_PAUSE_S
    try:
        async with asyncio.timeout(deadline_s):
            return await request
    except APIStatusError as error:
        reason = f"HTTP {error.status_code}: {error.response.text}"
        raise RequestFailed(_short(_without(key, reason)), error.status_code) from None
    except TimeoutError:
        raise RequestFailed(f"{NO_REPLY} {deadline_s:g} s") from None
    except (OpenAIError, ValueError) as error:  # ValueError: a reply that calls itself JSON and is not
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise RequestFailed(_short(_without(key, f"{type(error).__name__}: {error}{cause}"))) from None


def _without(key: str, text: str) -> str:
    return text.replace(key, "***") if key != NO_KEY else text


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST_REASON]
