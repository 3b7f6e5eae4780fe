"""Puts load on a server that speaks OpenAI's API, with vLLM's own load test; penstock/reports/loadtest.py shows it.

vLLM sends the requests, takes the times and computes the percentiles, in a process of its own: it takes seconds to
import. Its random prompts differ from each other, so that no prefix cache answers them. Added here: what is refused
before it starts, prompts from a file, and the memory of this machine's GPUs meanwhile.

Left out: chat, arrival rates (users ask again as soon as they are answered), tests that end after a time.
"""

from __future__ import annotations

import json
import os
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

from penstock.base.errors import UserError
from penstock.cli.serving.serve import QUIET
from penstock.engines.commands.hosts import GpuSample
from penstock.engines.groups.machine import GIB, GpuSampler, visible_gpus
from penstock.reports.loadtest import GpuUse, LoadFigures, figures, write_results

PROGRAM = "penstock.cli.serving.vllm_load"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ERROR_CHARACTERS = 800


@dataclass(frozen=True)
class Load:
    """How much is asked; prompts are random ones of so many tokens, or those of a file."""

    users: int
    requests: int
    prompts: int | Path
    max_tokens: int


@dataclass(frozen=True)
class Served:
    """The model behind a server; the folder that it is of and its longest prompt with response, where it says so."""

    model: str
    folder: str | None
    max_length: int | None


def run_loadtest(url: str, load: Load, tokenizer: Path | None, to: Path | None) -> tuple[LoadFigures, Path]:
    """Test the server at `url`; return the figures and the folder with `loadtest.json` and `loadtest.png`.

    Args:
        tokenizer: folder of the model's tokenizer; None: the one that the server names, if it is on this machine.

    Raises:
        UserError: nothing answers at `url`, there is no tokenizer, the load does not fit the model, or no request
            succeeds.
    """
    url = url.rstrip("/").removesuffix("/v1")
    served = find_model(url)
    check_length(served, load)
    folder = tokenizer_folder(served, tokenizer)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        gpus = visible_gpus() if urlsplit(url).hostname in LOOPBACK else []
        sampler = stack.enter_context(GpuSampler()).watch(gpus)
        measured = _measured(url, served, folder, load, Path(scratch))
        uses = _uses(sampler.take(float("inf")))
    found = figures(measured, load.users, uses)
    results = to or Path("loadtests") / datetime.now().strftime("%Y%m%d-%H%M%S")
    prompts = f"{load.prompts} random tokens" if isinstance(load.prompts, int) else "of a file"
    facts = {"url": url, "model": served.model, "prompts": prompts, "max_tokens": load.max_tokens}
    write_results(found, measured, facts, results)
    return found, results


def find_model(url: str) -> Served:
    """Return the first model that the server offers.

    Raises:
        UserError: nothing answers there in the form of OpenAI's API.
    """
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            first = json.load(response)["data"][0]
        return Served(first["id"], first.get("root"), first.get("max_model_len"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        answered = isinstance(error, urllib.error.HTTPError)  # which says its number, where the other wraps a reason
        raise UserError(
            f"{url} does not answer as a server with OpenAI's API: "
            f"{error if answered else getattr(error, 'reason', error)}",
            "start one: penstock serve FOLDER",
        ) from error


def check_length(served: Served, load: Load) -> None:
    """Check that a random prompt and its response fit the model.

    Raises:
        UserError: they are longer than it takes, or the prompt has no token.
    """
    if not isinstance(load.prompts, int):
        return
    if load.prompts < 1:
        raise UserError("--prompts is 0", "ask for one token at least, or name a file")
    if served.max_length is not None and load.prompts + load.max_tokens > served.max_length:
        raise UserError(
            f"{load.prompts} prompt and {load.max_tokens} response tokens are more than the {served.max_length} of "
            "the model",
            "lower --prompts or --max-tokens",
        )


def tokenizer_folder(served: Served, given: Path | None) -> Path:
    """Return the folder of the tokenizer, with which prompts are made and counted.

    Raises:
        UserError: it is not there.
    """
    folder = given or Path(served.folder or "")
    if (folder / "tokenizer_config.json").is_file():
        return folder
    where = f"{given} holds" if given else f"the folder that the server names for '{served.model}' holds"
    raise UserError(f"{where} no tokenizer on this machine", "name one: --tokenizer FOLDER")


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or the `prompt` of each JSON line of a `.jsonl` file.

    Raises:
        UserError: there is no such file, no prompt in it, or a line without one.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist", "check the path of --prompts, or give a number of tokens")
    # Bytes, because lines of a text would also end at characters that may stand inside a prompt.
    lines = {number: line for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line.strip()}
    if not lines:
        raise UserError(f"{path} holds no prompts", "write one a line")
    if path.suffix == ".jsonl":
        return [_prompt_of(line, number, path) for number, line in lines.items()]
    try:
        return [line.decode() for line in lines.values()]
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text in UTF-8", "write it anew in UTF-8") from None


def _prompt_of(line: bytes, number: int, path: Path) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"line {number} of {path} is no JSON object with 'prompt'", "write one a line") from None
    return str(prompt)


def _measured(url: str, served: Served, tokenizer: Path, load: Load, scratch: Path) -> dict[str, Any]:
    """Run vLLM's load test and return its result, with the times of each request."""
    result = scratch / "result.json"
    command = [sys.executable, "-P", "-m", PROGRAM, "--base-url", url, "--model", served.model]
    command += ["--tokenizer", str(tokenizer), "--num-prompts", str(load.requests)]
    command += ["--max-concurrency", str(load.users), *_asked(load, scratch), "--percentile-metrics", "ttft,tpot,e2el"]
    command += ["--metric-percentiles", "50,95,99", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(scratch), "--result-filename", result.name]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    if not result.is_file():
        said = done.stderr.strip()[-ERROR_CHARACTERS:]
        raise UserError(f"vLLM's load test ended with code {done.returncode}: {said}", "see its message")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _asked(load: Load, scratch: Path) -> Sequence[str]:
    """Return what vLLM is to ask; responses to random prompts have exactly `max_tokens`."""
    most = str(load.max_tokens)
    if isinstance(load.prompts, int):
        random = ["--dataset-name", "random", "--random-input-len", str(load.prompts), "--random-output-len", most]
        return [*random, "--ignore-eos"]
    prompts = scratch / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in read_prompts(load.prompts)))
    custom = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", most]
    return [*custom, "--skip-chat-template"]


def _uses(samples: Sequence[GpuSample]) -> list[GpuUse]:
    most: dict[int, float] = {}
    for sample in samples:
        most[sample.gpu] = max(sample.memory_gib, most.get(sample.gpu, 0.0))
    return [GpuUse(gpu, gib, _memory_gib(gpu)) for gpu, gib in sorted(most.items())]


def _memory_gib(gpu: int) -> float:
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).total) / GIB
