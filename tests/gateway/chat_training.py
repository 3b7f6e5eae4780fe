"""Trainings of a tiny chat model on sums of two digits, in a user's folder; its warm-up's teacher is often wrong.

One runs in this process and ends; another, of the same recipe in the same folder, is killed in its middle and resumed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from penstock.configs.loading.load import load_config
from penstock.configs.sections.model import TinyModel
from penstock.flows.train import train
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.chat.model import TEMPLATE, make_chat_model
from tests.comparing import numbers, weights
from tests.processes import alive, words_of
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
COMPARED = ("prompt", "response_tokens", "loss_mask", "reward", "advantages")
ITERATIONS, DIGITS = 4, 5
HELDOUT, RIGHT = 64, 0.4
RECIPE = """
name: sums
iterations: {iterations}
model: {{path: model}}
data:
  train: train.jsonl
  heldout: heldout.jsonl
  sft: sft.jsonl
  max_prompt_tokens: {longest}
  response: response
  chat: true
sft: {{steps: {steps}, batch: 64, optimizer: {{learning_rate: 3e-3, warmup_steps: 20, decay: cosine}}}}
environment: {environment}
rollout: {{prompts: 16, samples: 8, max_response_tokens: {tokens}, max_sequences: 128}}
algorithm: {{name: grpo, mini_batches: 2}}
actor: {{optimizer: {{learning_rate: 1e-3, warmup_steps: 0}}}}
evaluate: {{every: 0, temperature: 1.0, samples: 4}}
checkpoint: {{every: 2}}
"""


def problem(generator: np.random.Generator) -> dict[str, Any]:
    a, b = generator.integers(0, DIGITS, 2).tolist()
    return {"prompt": f"What is {a}+{b}?", "task": DIGITS * a + b, "wanted": str(a + b)}


def trained(
    folder: Path,
    environment: dict[str, Any],
    says: Callable[[dict[str, Any], bool, np.random.Generator], list[dict[str, Any]]],
    tokens: int = 12,
    longest: int = 40,
    steps: int = 250,
    words: int = 448,
) -> RunFolder:
    """Train in a folder that has all that the environment needs.

    Args:
        environment: that section of the recipe.
        says: what the teacher says to a problem, rightly or not, as rows for the warm-up.
        tokens: of an episode, behind its prompt.
        longest: of a prompt, in tokens.
        steps: of the warm-up.
        words: of the tokenizer, without control tokens.
    """
    generator = np.random.default_rng(0)
    problems = [problem(generator) for _ in range(2000)]
    pairs = [pair for row in problems for pair in says(row, generator.random() < RIGHT, generator)]
    for name, rows in (
        ("train", [problem(generator) for _ in range(200)]),
        ("heldout", [problem(generator) for _ in range(HELDOUT)]),
        ("sft", pairs),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_play = json.dumps({**environment, "workers": 1})
    recipe = RECIPE.format(iterations=ITERATIONS, environment=of_play, tokens=tokens, longest=longest, steps=steps)
    (folder / "recipe.yaml").write_text(recipe)
    room = longest + max(tokens, 24)
    tiny = TinyModel(hidden_size=96, layers=2, heads=3, kv_heads=3, intermediate_size=256, max_positions=room)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder))
        texts = [TEMPLATE, *(text for row in pairs for text in (row["prompt"], *_turns(row["response"])))]
        make_chat_model(folder / "model", texts, tiny, words)
        train(load_config(folder / "recipe.yaml", []), run_folder="run")
    return RunFolder(folder / "run")


def _turns(response: str | list[str]) -> list[str]:
    return [response] if isinstance(response, str) else response


def check_that_it_learnt(run: RunFolder) -> None:
    """The held-out reward has risen beyond both 95 % intervals, and no episode failed."""
    found = {item["iteration"]: item["metrics"] for item in read_metrics(run)}
    before, after = (found[iteration]["heldout/accuracy"] for iteration in (0, ITERATIONS))
    assert 0.1 < before < 0.8, "it begins in the middle"
    halves = [1.96 * (share * (1 - share) / HELDOUT) ** 0.5 for share in (before, after)]
    assert after - halves[1] > before + halves[0]
    assert all(found[iteration]["rollout/environment_failures"] == 0 for iteration in range(1, ITERATIONS + 1))


def killed_and_resumed(folder: Path, environments: str) -> RunFolder:
    """Repeat the training of a folder, kill it with SIGKILL once it has a checkpoint, and resume it.

    All that it started has to be gone within 5 s of the kill; the process that plays its episodes is among it.

    Args:
        environments: what the command line of that process has in it.
    """
    run = RunFolder(folder / "killed")
    process = _started(folder, "recipe.yaml", "--run", run.name)
    until(lambda: _saved(run) == 2 or process.poll() is not None, 400, "the checkpoint of iteration 2", 0.01)
    started = psutil.Process(process.pid).children(recursive=True)
    for words in ("penstock.engines.groups.rank", environments):
        assert any(words in " ".join(words_of(child)) for child in started), words
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    until(lambda: not any(map(alive, started)), 5, "all that the training started is gone")
    assert read_manifest(run).progress.iteration == 2 and not run.experience(ITERATIONS).exists()
    said = (folder / "said.txt").read_text
    assert _started(folder, "--resume", run.name).wait(400) == 0, said(encoding="utf-8")
    return run


def check_that_it_ended_alike(run: RunFolder, alone: RunFolder) -> None:
    """Weights, figures and episodes are those of the training that nobody disturbed. Control: it did learn something,
    from episodes that differ from one iteration to the next.
    """
    assert numbers(run) == numbers(alone)
    episodes = [[_episodes(one, number) for number in range(1, ITERATIONS + 1)] for one in (run, alone)]
    assert episodes[0] == episodes[1]
    assert weights(run) == weights(alone)
    assert len({repr(found) for found in episodes[0]}) == ITERATIONS
    assert weights(alone) != (alone.model("sft") / "model.safetensors").read_bytes()


def _episodes(run: RunFolder, number: int) -> list[list[Any]]:
    columns = read_columns(run.experience(number), [*COMPARED])
    return [list(getattr(columns[name], "values_T", columns[name])) for name in COMPARED]


def _started(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the command line in a folder, with the server of the tests."""
    environment = os.environ | {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    command = [sys.executable, "-m", "penstock.cli.main", "train", *arguments]
    with (folder / "said.txt").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def _saved(run: RunFolder) -> int:
    """The iteration from whose checkpoint a resume goes on."""
    return read_manifest(run).progress.iteration if run.manifest.is_file() else 0
