"""What `penstock loadtest` has Locust run: users that stream completions, and a line of JSON for each request.

Locust loads this file in a process of its own, because it replaces the sockets of whatever process it is in. Times are
taken here, since Locust's own percentiles are rounded. Left out: statistics of the lines
(penstock/reports/loadtest.py).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from locust import HttpUser, constant, events, task


@events.init_command_line_parser.add_listener
def _add_argument(parser: Any) -> None:
    parser.add_argument("--plan", help="JSON file: what to ask, and the file to write lines to")


@events.init.add_listener
def _begin(environment: Any, **_: Any) -> None:
    plan = json.loads(Path(environment.parsed_options.plan).read_text(encoding="utf-8"))
    CompletionUser.plan = plan
    CompletionUser.lines = Path(plan["lines"]).open("w", encoding="utf-8")  # noqa: SIM115  (closed when Locust quits)
    CompletionUser.random = random.Random(plan["seed"])


@events.quitting.add_listener
def _close(**_: Any) -> None:
    CompletionUser.lines.close()


class CompletionUser(HttpUser):
    """Asks for one completion after the other, without a pause between them."""

    wait_time = constant(0)
    plan: dict[str, Any]  # of all users, as those below
    random: Any
    lines: TextIO

    @task
    def complete(self) -> None:
        """Stream one completion and write down when its first and its last token came."""
        body = self.plan["body"] | {"prompt": self._prompt()}
        begin = time.time()
        first, tokens, failure = None, 0, None
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True, timeout=600) as response:
            if response.status_code != 200:
                failure = f"status {response.status_code}: {(response.text or '')[:200]}"
            else:
                for event in _events(response):
                    if "error" in event:
                        failure = str(event["error"])[:200]
                    if first is None and event.get("choices"):
                        first = time.time()
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if failure is None and not tokens:
                    failure = "the stream ended without a count of its tokens"
            if failure:
                response.failure(failure)
            else:
                response.success()
        record = {"begin": begin, "first": first, "end": time.time(), "tokens": tokens, "failure": failure}
        self.lines.write(json.dumps(record) + "\n")

    def _prompt(self) -> Any:
        if self.plan["prompts"]:
            return self.random.choice(self.plan["prompts"])
        return self.random.choices(self.plan["token_ids"], k=self.plan["prompt_tokens"])


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event."""
    for line in response.iter_lines(chunk_size=None):
        text = line.decode("utf-8").removeprefix("data:").strip()
        if text and text != "[DONE]":
            yield json.loads(text)
