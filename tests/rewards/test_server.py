"""Requests to a server: order, how many at a time, retries, deadlines, and that what fails is a value."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.reward_servers import RewardServer
from penstock.rewards.server import NOT_ASKED, Failed, Post, RequestFailed, ask_all, offered_models
from tests.rewards.scripted_server import Reply, scripted


def server_at(url: str, **settings: Any) -> RewardServer:
    return RewardServer(**{"url": url, "model": "m", "timeout_s": 5.0, "retries": 0, **settings})


def ask_numbers(server: RewardServer, count: int, concurrency: int = 4, tolerated: float = 1e9) -> list[float | Failed]:
    """Ask for the number of every row."""

    async def ask(post: Post, chunk: range) -> list[float | Failed]:
        return [(await post("/v1/number", {"row": chunk.start}))["row"]]

    return ask_all(server, concurrency, ask, [range(row, row + 1) for row in range(count)], tolerated)


def failures(answers: list[float | Failed]) -> dict[int, str]:
    return {row: answer.reason for row, answer in enumerate(answers) if isinstance(answer, Failed)}


@contextmanager
def in_a_thread(handle: Any) -> Iterator[int]:
    """Serve connections with a coroutine; yields the port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()


def test_as_many_as_allowed_are_asked_at_once_and_answers_keep_their_rows() -> None:
    """The server replies only when four requests are there: fewer in flight would wait in vain."""
    four = threading.Barrier(4)

    def reply(body: dict[str, Any]) -> Reply:
        four.wait(5)
        time.sleep(0.02 * (body["row"] % 3))
        return 200, body

    with scripted(reply) as seen:
        assert ask_numbers(server_at(seen.url), 12) == list(range(12))
        assert seen.most_at_once == 4


def test_an_address_may_end_as_openai_clients_write_it() -> None:
    """http://HOST:PORT, with or without a slash and /v1."""
    with scripted(lambda body: (200, body)) as seen:
        for end in ("", "/", "/v1", "/v1/"):
            assert ask_numbers(server_at(seen.url + end), 1) == [0]
            assert offered_models(server_at(seen.url + end)) == ["m"]


@pytest.mark.parametrize(("status", "helps"), [(500, True), (503, True), (429, True), (400, False), (404, False)])
def test_what_may_pass_is_asked_again(status: int, helps: bool) -> None:
    """Two attempts fail; a third one exists with two retries only, and never for a mistake in the request."""

    def ask(retries: int) -> list[float | Failed]:
        left = [status, status]

        def reply(body: dict[str, Any]) -> Reply:
            return (left.pop(), "{}") if left else (200, body)

        with scripted(reply) as seen:
            return ask_numbers(server_at(seen.url, retries=retries), 1)

    assert (ask(2) == [0]) is helps
    assert str(status) in failures(ask(1))[0]


def test_a_lost_connection_is_tried_again() -> None:
    """The server closes it once without a reply."""
    closed: list[int] = []

    def reply(body: dict[str, Any]) -> Reply | None:
        return (200, body) if closed else closed.append(1)  # type: ignore[func-returns-value]

    with scripted(reply) as seen:
        assert ask_numbers(server_at(seen.url, retries=1), 1) == [0]
    assert "Connection" in failures(ask_numbers(server_at(seen.url), 1))[0]  # and nobody is there any more


def test_a_request_without_an_end_fails_at_its_deadline() -> None:
    """Also where the server keeps sending: every read is quick, the reply never complete."""
    released = threading.Event()

    def silent(body: dict[str, Any]) -> Reply:
        released.wait(5)
        return 200, body

    with scripted(silent) as seen:
        started = time.monotonic()
        reason = failures(ask_numbers(server_at(seen.url, timeout_s=0.2), 1))[0]
        assert time.monotonic() - started < 3
        released.set()
    assert "timed out" in reason or "within 0.2 s" in reason  # the client's deadline or ours, the same here

    async def dribble(reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(100):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    with in_a_thread(dribble) as port:
        reasons = failures(ask_numbers(server_at(f"http://127.0.0.1:{port}", timeout_s=0.3), 1))
    assert reasons == {0: "no complete reply within 0.3 s"}


def test_a_reply_that_is_no_json_or_ends_early_is_a_failure() -> None:
    """Both say what came."""
    with scripted(lambda body: (200, "<html>") if body["row"] else (200, body)) as seen:
        answers = ask_numbers(server_at(seen.url), 2)
    assert answers[0] == 0
    assert "JSON" in failures(answers)[1]


def test_nothing_is_asked_any_more_once_too_much_is_lost() -> None:
    """A server that dies midway costs no further attempts; below the tolerated number everything is asked."""

    def reply(body: dict[str, Any]) -> Reply:
        return (200, body) if body["row"] < 5 else (400, "{}")

    with scripted(reply) as seen:
        answers = ask_numbers(server_at(seen.url), 20, concurrency=1, tolerated=3)
        assert [body["row"] for body in seen.bodies] == list(range(9))  # the fourth failure is one too many
        assert answers[:5] == list(range(5))
        assert [failures(answers)[row] == NOT_ASKED for row in range(5, 20)] == [False] * 4 + [True] * 11
    with scripted(reply) as seen:
        ask_numbers(server_at(seen.url), 20, concurrency=1, tolerated=15)
        assert len(seen.bodies) == 20


def test_a_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into a reason, though the server repeats it; without `api_key_env` OpenAI's own key is not sent."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    with scripted(lambda body: (400, {"error": f"no such key: sk-secret ({body})"})) as seen:
        ask_numbers(server_at(seen.url), 1)
        with pytest.raises(UserError, match="no JUDGE_KEY"):
            ask_numbers(server_at(seen.url, api_key_env="JUDGE_KEY"), 1)
        monkeypatch.setenv("JUDGE_KEY", "sk-secret")
        answers = ask_numbers(server_at(seen.url, api_key_env="JUDGE_KEY"), 1)
    assert seen.keys == ["Bearer none", "Bearer sk-secret"]
    assert "400" in failures(answers)[0]
    assert "no such key: ***" in failures(answers)[0]


def test_offered_models_of_something_else_is_a_failure() -> None:
    """A server that answers, but not as OpenAI's API does."""
    with scripted(lambda body: (200, body), status=404) as seen, pytest.raises(RequestFailed, match="404"):
        offered_models(server_at(seen.url))
