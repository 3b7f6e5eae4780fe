"""A tiny HTTP server whose replies a test writes: for what real servers do only when they are broken."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status and body: text is sent as it is, anything else as JSON


@dataclass
class Scripted:
    """A running server: its address, and what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def came(self, body: dict[str, Any], key: str | None) -> None:
        """Note a request."""
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)

    def went(self) -> None:
        """Note its reply."""
        with self._lock:
            self._now -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # connections beyond the usual 5 would wait a second


@contextmanager
def scripted(
    reply: Callable[[dict[str, Any]], Reply | None], models: tuple[str, ...] = ("m",), status: int = 200
) -> Iterator[Scripted]:
    """Serve: `reply` gets the body of a POST; None closes the connection without a reply."""
    seen = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(status, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.came(body, self.headers["Authorization"])
            try:
                found = reply(body)
                if found is None:
                    self.close_connection = True
                else:
                    self._send(*found)
            except (BrokenPipeError, ConnectionResetError):  # the client has given up
                self.close_connection = True
            finally:
                seen.went()

        def _send(self, code: int, body: Any) -> None:
            text = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.send_header("retry-after-ms", "1")  # tests need not wait for the client's growing pauses
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with _Server(("127.0.0.1", 0), Handler) as server:
        seen.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def chat_reply(text: str | None) -> Reply:
    """Return the reply of a chat with one choice."""
    return 200, {"choices": [{"message": {"content": text}}]}
