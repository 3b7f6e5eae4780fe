"""Locust's users against a server whose answers are known: what is measured is what it did.

The server speaks the part of OpenAI's API that vLLM's does, from the standard library, so that its pauses are exact.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.cli.serving.loadtest import Load, find_model, known_token_ids, read_prompts, run_loadtest

FIRST_S, REST_S, TOKENS = 0.15, 0.1, 4


class Server(ThreadingHTTPServer):
    """Remembers what it was asked; every fifth completion fails."""

    daemon_threads = True
    bodies: list[dict[str, Any]]
    lock: threading.Lock


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json(200, {"tokens": [3, 5, 5, 9]})
            return
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies)
        if number % 5 == 0:
            self._json(503, {"error": "busy"})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(TOKENS):
            time.sleep(FIRST_S if index == 0 else REST_S)
            self._event({"choices": [{"text": "x"}]})
        self._event({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(content)}\n\n")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _json(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing for the terminal."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The server, on a free port."""
    found = Server(("127.0.0.1", 0), Handler)
    found.bodies, found.lock = [], threading.Lock()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def url(server: Server) -> str:
    """Where it listens."""
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_what_is_measured_is_what_the_server_did(server: Server, url: str, tmp_path: Path) -> None:
    """Three users for six seconds: times of first and last token, tokens, failures, and distinct random prompts."""
    found, folder = run_loadtest(f"{url}/v1/", Load(3, 6, 16, None, 8), tmp_path / "out")
    whole = FIRST_S + (TOKENS - 1) * REST_S
    assert FIRST_S <= found.first_token_p50 < FIRST_S + REST_S  # a user that waits for all of it would say `whole`
    assert whole <= found.latency_p50 < whole + 0.3
    assert found.seconds_per_token_p50 == pytest.approx(REST_S, rel=0.4)
    assert found.tokens_mean == TOKENS
    assert found.failures >= 4
    (reason,) = found.failure_reasons
    assert reason.startswith("status 503")
    assert found.requests - found.failures >= 6
    assert found.tokens_per_s == pytest.approx(found.requests_per_s * TOKENS)
    asked = server.bodies
    assert found.requests <= len(asked) <= found.requests + 3, "what is under way at the end is not counted"
    assert all(len(body["prompt"]) == 16 and set(body["prompt"]) <= {3, 5, 9} for body in asked)
    assert len({tuple(body["prompt"]) for body in asked}) == len(asked)
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in asked} == {("tiny", 8, True)}
    assert {path.name for path in folder.iterdir()} == {"loadtest.json", "loadtest.png"}


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """One a line, or the prompt of each JSON line; a line without one is named."""
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("1+1=\n\n2+2=\n")
    assert read_prompts(plain) == ["1+1=", "2+2="]
    lines.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(UserError, match="line 2 of"):
        read_prompts(lines)
    with pytest.raises(UserError, match="does not exist"):
        read_prompts(tmp_path / "absent.txt")


def test_a_load_that_cannot_be_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long for the model, two kinds of prompts, no server, no Locust: each before anything starts."""
    with pytest.raises(UserError, match="more than the 64 of the model"):
        known_token_ids(url, find_model(url), Load(1, 1, 60, None, 8))
    with pytest.raises(UserError, match="exclude each other"):
        run_loadtest(url, Load(1, 1, 16, tmp_path / "prompts.txt", 8), None)
    with pytest.raises(UserError, match="penstock serve FOLDER"):
        run_loadtest("http://127.0.0.1:9", Load(1, 1, None, None, 8), None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'locust"):
        run_loadtest(url, Load(1, 1, None, None, 8), None)
