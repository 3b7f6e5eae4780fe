"""Trainings of a tiny chat model on sums of two digits, in a user's folder; its warm-up's teacher is often wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.configs.sections.model import TinyModel
from penstock.flows.train import train
from penstock.state.run_folder import RunFolder, read_metrics
from tests.chat.model import TEMPLATE, make_chat_model

ITERATIONS, DIGITS = 4, 5
HELDOUT, RIGHT = 64, 0.4
RECIPE = """
name: sums
iterations: {iterations}
model: {{path: model}}
data:
  {{train: train.jsonl, heldout: heldout.jsonl, sft: sft.jsonl, max_prompt_tokens: 40, response: response, chat: true}}
sft: {{steps: 250, batch: 64, optimizer: {{learning_rate: 3e-3, warmup_steps: 20, decay: cosine}}}}
environment: {environment}
rollout: {{prompts: 16, samples: 8, max_response_tokens: 12, max_sequences: 128}}
algorithm: {{name: grpo, mini_batches: 2}}
actor: {{optimizer: {{learning_rate: 1e-3, warmup_steps: 0}}}}
evaluate: {{every: 0, temperature: 1.0, samples: 4}}
checkpoint: {{every: 0}}
"""


def problem(generator: np.random.Generator) -> dict[str, Any]:
    a, b = generator.integers(0, DIGITS, 2).tolist()
    return {"prompt": f"What is {a}+{b}?", "task": DIGITS * a + b, "wanted": str(a + b)}


def trained(
    folder: Path, environment: dict[str, Any], says: Callable[[dict[str, Any], bool, np.random.Generator], str]
) -> RunFolder:
    """Train in a folder that has all that the environment needs.

    Args:
        environment: that section of the recipe.
        says: what the teacher says to a problem, rightly or not.
    """
    generator = np.random.default_rng(0)
    problems = [problem(generator) for _ in range(2000)]
    pairs = [{**row, "response": says(row, generator.random() < RIGHT, generator)} for row in problems]
    for name, rows in (
        ("train", [problem(generator) for _ in range(200)]),
        ("heldout", [problem(generator) for _ in range(HELDOUT)]),
        ("sft", pairs),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = RECIPE.format(iterations=ITERATIONS, environment=json.dumps({**environment, "workers": 1}))
    (folder / "recipe.yaml").write_text(recipe)
    tiny = TinyModel(hidden_size=96, layers=2, heads=3, kv_heads=3, intermediate_size=256, max_positions=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder))
        texts = [TEMPLATE, *(text for row in pairs for text in (row["prompt"], row["response"]))]
        make_chat_model(folder / "model", texts, tiny)
        train(load_config(folder / "recipe.yaml", []), run_folder="run")
    return RunFolder(folder / "run")


def check_that_it_learnt(run: RunFolder) -> None:
    """The held-out reward has risen beyond both 95 % intervals, and no episode failed."""
    found = {item["iteration"]: item["metrics"] for item in read_metrics(run)}
    before, after = (found[iteration]["heldout/accuracy"] for iteration in (0, ITERATIONS))
    assert 0.1 < before < 0.8, "it begins in the middle"
    halves = [1.96 * (share * (1 - share) / HELDOUT) ** 0.5 for share in (before, after)]
    assert after - halves[1] > before + halves[0]
    assert all(found[iteration]["rollout/environment_failures"] == 0 for iteration in range(1, ITERATIONS + 1))
