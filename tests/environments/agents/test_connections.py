"""HTTP of the gateway as any client may speak it: in pieces, several requests on a connection, or not at all."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.environments.gateway import connections
from penstock.environments.gateway.asks import Turn
from penstock.environments.gateway.server import Gateway, Session

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str, Session], Awaitable[None]]


def spoken(play: Play, answers: int = 0) -> None:
    """Speak to a gateway over a connection of one's own, while as many rounds of an episode are answered."""

    async def both() -> None:
        gateway = Gateway()
        session = gateway.open()
        host, port = gateway.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        policy = asyncio.create_task(_answered(session, answers))
        try:
            await asyncio.wait_for(play(reader, writer, session.url.removeprefix(gateway.address), session), 20)
            await policy
        finally:
            policy.cancel()
            writer.close()

    asyncio.run(both())


async def _answered(session: Session, answers: int) -> None:
    for _ in range(answers):
        session.answer([[Turn(f"<{ask.text}>", prompt=[1], tokens=[2])] for ask in await session.asked()], False)


def request(path: str, body: Any, *headers: str) -> bytes:
    told = json.dumps(body).encode()
    lines = [f"POST {path}/completions HTTP/1.1", "Host: policy", f"Content-Length: {len(told)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + told


async def answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Read an answer: status line, headers, body."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    return status, headers, await reader.readexactly(int(headers["content-length"]))


def text(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def test_requests_of_a_connection_are_answered_in_their_order() -> None:
    """Both come in one piece, then one byte by byte; the connection stays. Control: one that asks to close."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, _: Session) -> None:
        writer.write(request(path, {"prompt": "b"}) + request(path, {"prompt": "a"}))
        assert [text((await answer(reader))[2]) for _ in range(2)] == ["<b>", "<a>"]
        for byte in request(path, {"prompt": "c"}):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert text((await answer(reader))[2]) == "<c>"
        writer.write(request(path, {"prompt": "d"}, "Connection: close"))
        status, headers, body = await answer(reader)
        assert (status, headers["connection"], text(body)) == ("HTTP/1.1 200 OK", "close", "<d>")
        assert await reader.read() == b""

    spoken(play, answers=3)


def test_a_client_that_waits_for_leave_gets_it() -> None:
    """`Expect: 100-continue`, as curl has it for long requests. Control: others are not told to go on."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, _: Session) -> None:
        head, body = request(path, {"prompt": "a"}, "Expect: 100-continue").split(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await answer(reader))[0] == "HTTP/1.1 200 OK"

    spoken(play, answers=1)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * (connections.LARGEST_HEAD + 1), "HTTP/1.1 400 Bad Request"),
    ],
)
def test_what_is_not_http_ends_its_connection_alone(sent: bytes, status: str) -> None:
    """It is told so; the episode is asked as before. Control: the tests above."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, session: Session) -> None:
        writer.write(sent)
        assert (await reader.readuntil(b"\r\n")).decode().strip() == status
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other.write(request(path, {"prompt": "a"}))
        assert text((await answer(other_reader))[2]) == "<a>"
        other.close()
        assert session.open == 0 == session.refused

    spoken(play, answers=1)


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    """In the middle of its request, or before its answer: the episode does not count it as open any more."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, session: Session) -> None:
        writer.write(request(path, {"prompt": "a"})[:-3])
        while not session.open:
            await asyncio.sleep(0.001)
        writer.close()
        while session.open:
            await asyncio.sleep(0.001)
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other.write(request(path, {"prompt": "b"}))
        while not session.open:
            await asyncio.sleep(0.001)
        other.close()
        asked = await session.asked()
        session.answer([[Turn("x", prompt=[1], tokens=[2])] for _ in asked], False)
        assert session.open == 0

    spoken(play)


def test_a_connection_that_rests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: one that waits for its answer is not, however long."""
    monkeypatch.setattr(connections, "RESTS_S", 0.05)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, session: Session) -> None:
        waiting_reader, waiting = await asyncio.open_connection(*writer.get_extra_info("peername"))
        waiting.write(request(path, {"prompt": "a"}))
        assert await reader.read() == b""
        session.answer([[Turn("x", prompt=[1], tokens=[2])] for _ in await session.asked()], False)
        assert text((await answer(waiting_reader))[2]) == "x"
        waiting.close()

    spoken(play)


def test_what_is_not_http_waits_behind_answers_that_are_due() -> None:
    """Bytes behind the last request of a connection change nothing; nonsense behind another is told after its answer.

    Control: without a request before it, it is told at once (above).
    """

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, _: Session) -> None:
        writer.write(request(path, {"prompt": "a"}) + b"nonsense\r\n\r\n")
        assert text((await answer(reader))[2]) == "<a>"
        assert (await answer(reader))[0] == "HTTP/1.1 400 Bad Request"
        assert await reader.read() == b""
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other.write(request(path, {"prompt": "b"}, "Connection: close") + b"more\r\n\r\n")
        assert text((await answer(other_reader))[2]) == "<b>"
        assert await other_reader.read() == b""
        other.close()

    spoken(play, answers=2)


def test_a_head_has_no_body() -> None:
    """What it would have is told, and the next answer begins right behind. Control: GET has it."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, _: Session) -> None:
        ask = " {}/models HTTP/1.1\r\nHost: policy\r\n\r\n".format(path.removesuffix("/"))
        writer.write(f"HEAD{ask}GET{ask}".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, headers, body = await answer(reader)
        assert head.startswith("HTTP/1.1 200 OK") and status == "HTTP/1.1 200 OK"
        assert f"content-length: {headers['content-length']}\r\n" in head and json.loads(body)["data"]

    spoken(play)


@pytest.mark.parametrize(
    ("asked", "status", "allowed"),
    [
        ("GET {}/chat/completions", "405 Method Not Allowed", "POST"),
        ("POST {}/models", "405 Method Not Allowed", "GET, HEAD"),
        ("POST {}/embeddings", "404 Not Found", None),
        ("GET /another/v1/models", "404 Not Found", None),
        ("GET {}/models", "200 OK", None),
    ],
)
def test_a_wrong_method_is_told_which_ones_there_are(asked: str, status: str, allowed: str | None) -> None:
    """With 405, as HTTP has it. Controls: a place that nobody has, which names those that are there; a right method."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, _: Session) -> None:
        writer.write(f"{asked.format(path)} HTTP/1.1\r\nHost: policy\r\n\r\n".encode())
        answered, headers, body = await answer(reader)
        assert (answered, headers.get("allow")) == (f"HTTP/1.1 {status}", allowed)
        if "embeddings" in asked:
            assert "/v1/chat/completions" in json.loads(body)["error"]["message"]

    spoken(play)


def test_a_client_that_does_not_read_is_not_read_either() -> None:
    """So that what is kept for it has an end. Control: all answers come once it reads."""
    asked = 60_000  # with answers of 12 MB, more than sockets hold

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, session: Session) -> None:
        one = "GET {}/models HTTP/1.1\r\nHost: policy\r\n\r\n".format(path.removesuffix("/")).encode()
        writer.write(one * asked)
        for _ in range(200):
            await asyncio.sleep(0.001)
        (connection,) = session._gateway._connections.opened
        assert connection._transport.get_write_buffer_size() < 1 << 20
        head = await reader.readuntil(b"\r\n\r\n")
        length = len(head) + int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        assert len(await reader.readexactly(asked * length - len(head))) > 8 << 20

    spoken(play)


def test_many_connect_while_the_loop_is_busy() -> None:
    """More than asyncio's own backlog, in one pass of the loop. Control: its backlog would hold 100."""

    async def connect() -> None:
        gateway = Gateway()
        gateway.open()
        await asyncio.sleep(0.01)  # so that it listens
        host, port = gateway.address.removeprefix("http://").split(":")
        clients = []
        for _ in range(300):
            client = socket.socket()
            client.settimeout(0.5)
            client.connect((host, int(port)))
            clients.append(client)
        for client in clients:
            client.close()

    asyncio.run(connect())


def test_an_episode_that_ends_waits_for_no_body() -> None:
    """A request that stalls is answered, and its connection closed. Control: it is open until then."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, session: Session) -> None:
        writer.write(request(path, {"prompt": "a"})[:-3])
        while not session.open:
            await asyncio.sleep(0.001)
        session.close()
        assert session.open == 0 and not session.reading
        assert (await answer(reader))[0] == "HTTP/1.1 400 Bad Request"
        assert await reader.read() == b""

    spoken(play)
