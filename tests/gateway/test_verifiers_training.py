"""A taskset of verifiers as a whole training: a chat model that is often wrong learns to be right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.loading.load import load_config
from configs.sections.model import TinyModel
from flows.train import train
from penstock.data.tokenizer import load_tokenizer
from penstock.environments.verifiers import FILE
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.chat.model import TEMPLATE, make_chat_model
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("verifiers"), pytest.mark.timeout(600)]

TASKSET = Path(__file__).resolve().parents[1] / "penstock" / "environments" / "verifiers_sums.py"
ITERATIONS, DIGITS = 6, 5
RECIPE = f"""
name: sums
iterations: {ITERATIONS}
model: {{path: model}}
data: {{train: train.jsonl, heldout: heldout.jsonl, sft: sft.jsonl, response: response, chat: true}}
sft: {{steps: 300, batch: 64, optimizer: {{learning_rate: 3e-3, warmup_steps: 20, decay: cosine}}}}
environment: {{type: "penstock.environments.verifiers:Taskset", settings: {{name: sums}}, timeout_s: 120}}
rollout: {{prompts: 16, samples: 8, max_response_tokens: 8, max_sequences: 128}}
algorithm: {{name: grpo, mini_batches: 2}}
actor: {{optimizer: {{learning_rate: 1e-3, warmup_steps: 0}}}}
evaluate: {{every: 0, temperature: 1.0, samples: 4}}
checkpoint: {{every: 0}}
"""


def problem(generator: np.random.Generator) -> dict[str, Any]:
    a, b = generator.integers(0, DIGITS, 2).tolist()
    return {"prompt": f"What is {a}+{b}?", "task": DIGITS * a + b, "sum": a + b}


def taught(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """What the warm-up's teacher says: four times in ten the sum."""
    said = row["sum"] if generator.random() < 0.4 else int(generator.integers(0, 2 * DIGITS - 1))
    return {**row, "response": f"It is {said}."}


@pytest.fixture(scope="module")
def learned(prefect_harness: None, verifiers_python: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training, in a user's folder: the taskset, the file that names it, data and recipe."""
    folder = tmp_path_factory.mktemp("sums")
    generator = np.random.default_rng(0)
    shutil.copy(TASKSET, folder)
    (folder / FILE).write_text(
        json.dumps(
            {"tasksets": {"sums": {"python": verifiers_python, "taskset": {"id": TASKSET.stem, "largest": DIGITS - 1}}}}
        )
    )
    pairs = [taught(problem(generator), generator) for _ in range(2000)]
    for name, rows in (
        ("train", [problem(generator) for _ in range(200)]),
        ("heldout", [problem(generator) for _ in range(64)]),
        ("sft", pairs),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    tiny = TinyModel(hidden_size=96, layers=2, heads=3, kv_heads=3, intermediate_size=256, max_positions=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder))
        texts = [TEMPLATE, *(text for row in pairs for text in (row["prompt"], row["response"]))]
        make_chat_model(folder / "model", texts, tiny)
        train(load_config(folder / "recipe.yaml", []), run_folder="run")
    return RunFolder(folder / "run")


def test_the_held_out_reward_rises(learned: RunFolder) -> None:
    """Beyond both 95 % intervals of its share of right answers; no episode fails. Control: it begins in the middle."""
    found = {item["iteration"]: item["metrics"] for item in read_metrics(learned)}
    before, after = found[0]["heldout/reward"], found[ITERATIONS]["heldout/reward"]
    assert 0.1 < before < 0.8
    halves = [1.96 * (share * (1 - share) / 64) ** 0.5 for share in (before, after)]
    assert after - halves[1] > before + halves[0]
    assert all(
        item["rollout/environment_failures"] == 0 == item["rollout/unbridged_turns"]
        for item in found.values()
        if "rollout/turns_mean" in item
    )


def test_what_is_learnt_from_is_the_chat_that_verifiers_had(learned: RunFolder) -> None:
    """The prompt is its conversation as the template renders it, and the response what the policy drew.

    Rewards and their parts are the taskset's. Control: both right and wrong ones are among them.
    """
    tokenizer = load_tokenizer(str(learned.path.parent / "model"))
    names = ["prompt", "prompt_tokens", "response", "reward", "environment/right", "environment/length", "loss_mask"]
    columns = read_columns(learned.experience(1), names)
    assert columns["loss_mask"].values_T.all(), "one turn, of the policy's own tokens"
    for row, reward in enumerate(columns["reward"].tolist()):
        chat = [{"role": "user", "content": columns["prompt"][row].partition("user\n")[2].partition("<|im_end|>")[0]}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert columns["prompt_tokens"].row(row).tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
        a, b = map(int, chat[0]["content"].removeprefix("What is ").rstrip("?").split("+"))
        said = columns["response"][row]
        assert reward == columns["environment/right"][row] == (said in (f"It is {a + b}.", f"It is {a + b}"))
        assert columns["environment/length"][row] == len(said)
    assert 0.1 < columns["reward"].mean() < 0.8
