"""A class of tools as a whole training: a chat model that seldom asks the tool learns to, because that is rewarded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.configs.sections.model import TinyModel
from penstock.data.tokenizer import load_tokenizer
from penstock.environments.loading import tools_told
from penstock.flows.train import train
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.chat.model import TEMPLATE, make_chat_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ITERATIONS = 4
BETWEEN = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
RECIPE = """
name: tools
iterations: {iterations}
model: {{path: model}}
data:
  {{train: train.jsonl, heldout: heldout.jsonl, sft: sft.jsonl, max_prompt_tokens: 224,
   prompt: question, response: response, chat: true}}
sft: {{steps: 240, batch: 32, max_tokens: 320, optimizer: {{learning_rate: 3e-3, warmup_steps: 20, decay: cosine}}}}
environment: {{type: "tests.chat.environments:Sums", max_turns: 3}}
rollout: {{prompts: 16, samples: 8, max_response_tokens: 72, max_sequences: 128}}
algorithm: {{name: grpo, mini_batches: 2}}
actor: {{optimizer: {{learning_rate: 1e-3, warmup_steps: 0}}}}
evaluate: {{every: 0, temperature: 1.0}}
checkpoint: {{every: 0}}
"""


def problem(generator: np.random.Generator) -> dict[str, Any]:
    a, b = generator.integers(1, 10, 2).tolist()
    return {"question": f"{a} and {b}?", "a": a, "b": b}


def taught(row: dict[str, Any], asks: bool) -> dict[str, Any]:
    """What the warm-up's teacher does: it asks the tool, or answers at once."""
    if not asks:
        return {**row, "response": [str(row["a"] + row["b"])]}
    call = json.dumps({"name": "add", "arguments": {"a": row["a"], "b": row["b"]}})
    result = str(row["a"] + row["b"])
    return {**row, "response": [f"<tool_call>\n{call}\n</tool_call><|im_end|>", BETWEEN.format(result), result]}


@pytest.fixture(scope="module")
def learned(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training."""
    folder = tmp_path_factory.mktemp("tools")
    generator = np.random.default_rng(0)
    pairs = [taught(problem(generator), generator.random() < 0.4) for _ in range(2000)]
    for name, rows in (
        ("train", [problem(generator) for _ in range(200)]),
        ("heldout", [problem(generator) for _ in range(64)]),
        ("sft", pairs),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(iterations=ITERATIONS))
    texts = [TEMPLATE, *("".join(row["response"]) for row in pairs), *(row["question"] for row in pairs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config(folder / "recipe.yaml", [])
        told = "".join(map(json.dumps, tools_told(config.environment) or []))
        tiny = TinyModel(hidden_size=96, layers=2, heads=3, kv_heads=3, intermediate_size=256, max_positions=384)
        make_chat_model(folder / "model", [*texts, *[told] * 50], tiny)
        train(load_config(folder / "recipe.yaml", []), run_folder="run")
    return RunFolder(folder / "run")


def test_it_learns_to_ask_the_tool(learned: RunFolder) -> None:
    """Calls, and the held-out reward that only they bring, rise."""
    asked = [
        float((read_columns(learned.experience(iteration), ["turns"])["turns"] > 1).mean())
        for iteration in (1, ITERATIONS)
    ]
    assert asked[1] > asked[0] + 0.15
    figures = {record["iteration"]: record["metrics"] for record in read_metrics(learned)}[ITERATIONS]
    assert figures["rollout/tool_calls_mean"] >= asked[1] and figures["rollout/tool_error_share"] < 0.1
    heldout = {record["iteration"]: record["metrics"].get("heldout/reward") for record in read_metrics(learned)}
    assert heldout[ITERATIONS] > heldout[0] + 0.1


def test_what_the_policy_saw_is_the_chat_as_the_template_renders_it(learned: RunFolder) -> None:
    """Prompt with tools, turn, result and answer, token by token; of these the policy's own alone are learnt from."""
    tokenizer = load_tokenizer(str(learned.path.parent / "model"))
    names = ["prompt_id", "response_tokens", "loss_mask", "advantages", "turns", "environment_reward"]
    columns = read_columns(learned.experience(ITERATIONS), names)
    prompts = read_columns(learned.prompts("train"), ["prompt_id", "prompt_tokens", "question", "a", "b"])
    rows = {name: number for number, name in enumerate(prompts["prompt_id"])}
    told = read_tools()
    seen = 0
    for row in np.flatnonzero((columns["turns"] == 2) & (columns["environment_reward"] == 1)):
        number = rows[columns["prompt_id"][row]]
        a, b = int(prompts["a"][number]), int(prompts["b"][number])
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        chat = [
            {"role": "user", "content": prompts["question"][number]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": str(a + b)},
        ]
        whole = tokenizer.apply_chat_template(chat, tools=told, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        prompt, response = prompts["prompt_tokens"].row(number).tolist(), columns["response_tokens"].row(row).tolist()
        if (prompt + response)[: len(expected)] != expected:
            continue  # a turn that says the same in other tokens, or more
        seen += 1
        mask = columns["loss_mask"].row(row)
        own = tokenizer.decode(columns["response_tokens"].row(row)[mask > 0])
        assert own.startswith("<tool_call>") and own.endswith("<|im_end|>") and "<tool_response>" not in own
        assert (columns["advantages"].row(row)[mask == 0] == 0).all()
    assert seen > 5


def read_tools() -> list[dict[str, Any]]:
    from penstock.configs.sections.rollout import EnvironmentConfig

    told = tools_told(EnvironmentConfig(type="tests.chat.environments:Sums"))
    assert told is not None
    return told
