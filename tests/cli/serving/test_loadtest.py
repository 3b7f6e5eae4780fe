"""vLLM's load test against a server whose answers are known: what is shown is what it did.

The server speaks the part of OpenAI's API that vLLM's does, from the standard library, so that its pauses are exact.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.cli.serving.loadtest import (
    Load,
    Served,
    check_length,
    find_model,
    read_prompts,
    run_loadtest,
    tokenizer_folder,
)
from penstock.data.tokenizer import make_byte_tokenizer

FIRST_S, REST_S, TOKENS = 0.15, 0.1, 4


class Server(ThreadingHTTPServer):
    """Remembers what it was asked; every fifth completion fails."""

    daemon_threads = True
    bodies: list[dict[str, Any]]
    folder: Path
    lock: threading.Lock


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny", "root": str(self.server.folder), "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._json(404, {})
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, on a free port, of a model with a byte tokenizer."""
    found = Server(("127.0.0.1", 0), Handler)
    found.bodies, found.lock, found.folder = [], threading.Lock(), tmp_path_factory.mktemp("model")
    make_byte_tokenizer(found.folder)
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


@pytest.mark.slow
def test_what_is_measured_is_what_the_server_did(server: Server, url: str, tmp_path: Path) -> None:
    """Three users, 20 requests: times of first and last token, tokens, failures, and different random prompts."""
    found, folder = run_loadtest(f"{url}/v1/", Load(3, 20, 16, 8), None, tmp_path / "out")
    whole = FIRST_S + (TOKENS - 1) * REST_S
    assert FIRST_S <= found.first_token_p50 < FIRST_S + REST_S  # a user that waits for all of it would say `whole`
    assert whole <= found.latency_p50 < whole + 0.3
    assert found.seconds_per_token_p50 == pytest.approx(REST_S, rel=0.4)
    assert found.tokens_mean == TOKENS
    assert (found.requests, found.failures, found.failure_reasons) == (20, 4, {"Service Unavailable": 4})
    assert found.tokens_per_s == pytest.approx(found.requests_per_s * TOKENS)
    asked = server.bodies
    assert len(asked) == 20
    assert len({body["prompt"] for body in asked}) > 10, "they begin at one of the 60 tokens of the small vocabulary"
    assert 16 in {len(body["prompt"]) for body in asked}, "of letters; a token that is none has a longer name"
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in asked} == {("tiny", 8, True)}
    assert {path.name for path in folder.iterdir()} == {"loadtest.json", "loadtest.png"}


@pytest.mark.slow
def test_prompts_of_a_file_are_asked_as_they_are(server: Server, url: str, tmp_path: Path) -> None:
    """Without a chat template, and their responses end by themselves. Control: those of the test above do not."""
    file, before = tmp_path / "prompts.txt", len(server.bodies)
    file.write_text("1+1=\n2+2=\n")
    run_loadtest(url, Load(1, 3, file, 8), server.folder, tmp_path / "out")
    asked = server.bodies[before:]
    assert {body["prompt"] for body in asked} == {"1+1=", "2+2="}
    assert all(body["max_tokens"] == 8 and "ignore_eos" not in body for body in asked)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """One a line, or the prompt of each JSON line; a line without one is named.

    What ends a line elsewhere, but not in a file, is a part of its prompt.
    """
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("1+1=\n\n2+2=\n")
    assert read_prompts(plain) == ["1+1=", "2+2="]
    odd = "one\u2028two\x85three\x0cfour"
    plain.write_text(f"{odd}\n2+2=\r\n", encoding="utf-8")
    lines.write_text(json.dumps({"prompt": odd}, ensure_ascii=False) + '\n{"prompt": "2+2="}\n', encoding="utf-8")
    assert read_prompts(plain) == read_prompts(lines) == [odd, "2+2="]
    lines.write_text('\n{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(UserError, match="line 3 of"):
        read_prompts(lines)
    plain.write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match="not a text in UTF-8"):
        read_prompts(plain)
    with pytest.raises(UserError, match="does not exist"):
        read_prompts(tmp_path / "absent.txt")


def test_a_load_that_cannot_be_is_refused(url: str, tmp_path: Path) -> None:
    """Too long for the model, no file, no server: each before anything starts. Control: one that fits."""
    with pytest.raises(UserError, match="more than the 64 of the model"):
        check_length(find_model(url), Load(1, 1, 60, 8))
    with pytest.raises(UserError, match="--prompts is 0"):
        check_length(find_model(url), Load(1, 1, 0, 8))
    check_length(find_model(url), Load(1, 1, 56, 8))
    with pytest.raises(UserError, match="absent.txt does not exist"):
        run_loadtest(url, Load(1, 1, tmp_path / "absent.txt", 8), None, None)
    with pytest.raises(UserError, match="penstock serve FOLDER"):
        run_loadtest("http://127.0.0.1:9", Load(1, 1, 16, 8), None, None)


def test_a_tokenizer_that_is_not_on_this_machine_is_asked_for(server: Server, tmp_path: Path) -> None:
    """The server's own folder may be elsewhere. Controls: it is here; a copy is named."""
    here, elsewhere = Served("tiny", str(server.folder), 64), Served("tiny", "/elsewhere/tiny", 64)
    assert tokenizer_folder(here, None) == tokenizer_folder(elsewhere, server.folder) == server.folder
    with pytest.raises(UserError, match="names for 'tiny' holds no tokenizer(.|\n)*--tokenizer FOLDER"):
        tokenizer_folder(elsewhere, None)
    with pytest.raises(UserError, match="holds no tokenizer"):
        tokenizer_folder(here, tmp_path)
