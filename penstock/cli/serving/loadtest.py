"""Puts load on a server that speaks OpenAI's API: Locust's users stream completions, and reports/loadtest.py counts.

Locust runs in a process of its own, since it replaces Python's sockets and threads. Random prompts are token ids of the
server's own tokenizer, drawn anew for each request, so that no prefix cache answers them.

Left out: chat, arrival rates (users ask again as soon as they are answered), several load generators.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pynvml

from engines.groups.machine import visible_gpus
from engines.sizing.gpu_sampler import GIB, GpuSampler
from penstock.base.errors import UserError
from penstock.reports.loadtest import GpuUse, LoadFigures, figures, read_lines, write_results

USERS_FILE = Path(__file__).with_name("locust_users.py")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROMPT_TOKENS = 128
SEED = 0
START_AND_STOP_S = 60.0  # what Locust may take beside the test itself
WORDS = "The quick brown fox jumps over 0123456789 lazy dogs, (a + b) * c = d; then it sleeps under the old oak."


@dataclass(frozen=True)
class Load:
    """How much is asked: `file` or random prompts of `prompt_tokens`, never both."""

    users: int
    seconds: int
    prompt_tokens: int | None
    file: Path | None
    max_tokens: int


@dataclass(frozen=True)
class Served:
    """The model behind a server, and the most tokens of a prompt with its response (None: the server does not say)."""

    model: str
    max_length: int | None


def run_loadtest(url: str, load: Load, to: Path | None) -> tuple[LoadFigures, Path]:
    """Test the server at `url`; return the figures and the folder with `loadtest.json` and `loadtest.png`.

    Raises:
        UserError: Locust is missing, nothing answers at `url`, the load does not fit the model, or no request succeeds.
    """
    if importlib.util.find_spec("locust") is None:
        raise UserError("the load test needs Locust", f"install it: {sys.executable} -m pip install 'locust>=2.40'")
    if load.file is not None and load.prompt_tokens is not None:
        raise UserError("--file and --prompt-tokens exclude each other", "remove one")
    url = url.rstrip("/").removesuffix("/v1")
    served = find_model(url)
    prompts = read_prompts(load.file) if load.file is not None else []
    token_ids = [] if prompts else known_token_ids(url, served, load)
    body: dict[str, Any] = {"model": served.model, "max_tokens": load.max_tokens, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | ({} if load.file else {"ignore_eos": True})
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        plan, lines = Path(scratch) / "plan.json", Path(scratch) / "lines.jsonl"
        plan.write_text(
            json.dumps(
                {
                    "prompts": prompts,
                    "token_ids": token_ids,
                    "prompt_tokens": load.prompt_tokens or PROMPT_TOKENS,
                    "body": body,
                    "seed": SEED,
                    "lines": str(lines),
                }
            )
        )
        gpus = visible_gpus() if urlsplit(url).hostname in LOOPBACK else []
        samplers = {gpu: stack.enter_context(GpuSampler([gpu])) for gpu in gpus}
        _run_locust(url, load, plan)
        requests = read_lines(lines)
        uses = [_use(gpu, most) for gpu, sampler in samplers.items() if (most := sampler.take(float("inf")))]
    found = figures(requests, load.users, uses)
    folder = to or Path("loadtests") / datetime.now().strftime("%Y%m%d-%H%M%S")
    length = "of a file" if load.file else f"{load.prompt_tokens or PROMPT_TOKENS} random tokens"
    facts = {"url": url, "model": served.model, "prompts": length, "max_tokens": load.max_tokens}
    write_results(found, requests, facts, folder)
    return found, folder


def find_model(url: str) -> Served:
    """Return the first model that the server offers.

    Raises:
        UserError: nothing answers there in the form of OpenAI's API.
    """
    try:
        models = _ask(f"{url}/v1/models")["data"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{url} does not answer as a server with OpenAI's API: {error}", "start one: penstock serve FOLDER"
        ) from error
    return Served(models[0]["id"], models[0].get("max_model_len"))


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or the `prompt` of each JSON line of a `.jsonl` file.

    Raises:
        UserError: there is no such file, no prompt in it, or a line without one.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist", "check the path of --file")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no prompts", "write one a line")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, number, path) for number, line in enumerate(lines, start=1)]


def _prompt_of(line: str, number: int, path: Path) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"line {number} of {path} is no JSON object with 'prompt'", "write one a line") from None
    return str(prompt)


def known_token_ids(url: str, served: Served, load: Load) -> list[int]:
    """Return token ids of the server's tokenizer, from which random prompts are drawn.

    Raises:
        UserError: the server has no tokenizer to ask, or prompt and response are longer than its model takes.
    """
    length = load.prompt_tokens or PROMPT_TOKENS
    if served.max_length is not None and length + load.max_tokens > served.max_length:
        raise UserError(
            f"{length} prompt and {load.max_tokens} response tokens are more than the {served.max_length} of the model",
            "lower --prompt-tokens or --max-tokens",
        )
    try:
        return sorted(set(_ask(f"{url}/tokenize", {"model": served.model, "prompt": WORDS})["tokens"]))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{url} tells no token ids ({error})", "give prompts with --file") from error


def locust_command(url: str, load: Load, plan: Path) -> Sequence[str]:
    """Return Locust's command: all users at once, no web page, no tables of its own."""
    command = [sys.executable, "-P", "-m", "locust", "-f", str(USERS_FILE), "--plan", str(plan), "--headless"]
    command += ["--host", url, "--users", str(load.users), "--spawn-rate", str(load.users)]
    command += ["--run-time", f"{load.seconds}s", "--only-summary", "--loglevel", "WARNING"]
    return [*command, "--exit-code-on-error", "0"]  # failed requests are figures, not an error of the test


def _run_locust(url: str, load: Load, plan: Path) -> None:
    done = subprocess.run(
        locust_command(url, load, plan),
        capture_output=True,
        text=True,
        check=False,
        timeout=load.seconds + START_AND_STOP_S,
    )
    if done.returncode:
        raise UserError(f"Locust ended with code {done.returncode}: {done.stderr.strip()[-800:]}", "see its message")


def _use(gpu: int, most: dict[str, float]) -> GpuUse:
    total = float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).total) / GIB
    return GpuUse(gpu, most["gpu/memory_gib"], total)


def _ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found
