"""A taskset of verifiers as a whole training: a chat model that is often wrong learns to be right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data.tokenizer import load_tokenizer
from penstock.environments.verifiers import FILE
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder
from tests.gateway.chat_training import (
    DIGITS,
    check_that_it_ended_alike,
    check_that_it_learnt,
    killed_and_resumed,
    trained,
)
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("verifiers"), pytest.mark.timeout(600)]

TASKSET = Path(__file__).resolve().parents[1] / "environments" / "verifiers_sums.py"


def says(row: dict[str, Any], right: bool, generator: np.random.Generator) -> list[dict[str, Any]]:
    return [{**row, "response": f"It is {row['wanted'] if right else generator.integers(0, 2 * DIGITS - 1)}."}]


@pytest.fixture(scope="module")
def learned(prefect_harness: None, verifiers_python: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training, with the taskset and the file that names it in the working folder."""
    folder = tmp_path_factory.mktemp("sums")
    shutil.copy(TASKSET, folder)
    taskset = {"id": TASKSET.stem, "largest": DIGITS - 1}
    (folder / FILE).write_text(json.dumps({"tasksets": {"sums": {"python": verifiers_python, "taskset": taskset}}}))
    environment = {"type": "penstock.environments.verifiers:Taskset", "settings": {"name": "sums"}, "timeout_s": 120}
    return trained(folder, environment, says)


def test_the_held_out_reward_rises(learned: RunFolder) -> None:
    """Of right answers, which alone are worth anything."""
    check_that_it_learnt(learned)


def test_what_is_learnt_from_is_the_chat_that_verifiers_had(learned: RunFolder) -> None:
    """The prompt is its conversation as the template renders it, and the response what the policy drew.

    Rewards and their parts are the taskset's. Control: both right and wrong ones are among them.
    """
    tokenizer = load_tokenizer(str(learned.path.parent / "model"))
    names = ["prompt", "prompt_tokens", "response", "reward", "environment/right", "environment/length"]
    columns = read_columns(learned.experience(1), [*names, "loss_mask", "unbridged_turns"])
    assert columns["loss_mask"].values_T.all(), "one turn, of the policy's own tokens"
    assert not columns["unbridged_turns"].any()
    for row, reward in enumerate(columns["reward"].tolist()):
        asked = columns["prompt"][row].partition("user\n")[2].partition("<|im_end|>")[0]
        chat = [{"role": "user", "content": asked}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert columns["prompt"][row] == whole
        assert columns["prompt_tokens"].row(row).tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
        a, b = map(int, asked.removeprefix("What is ").rstrip("?").split("+"))
        said = columns["response"][row]
        assert reward == columns["environment/right"][row] == (said in (f"It is {a + b}.", f"It is {a + b}"))
        assert columns["environment/length"][row] == len(said)
    assert 0.1 < columns["reward"].mean() < 0.8


@pytest.mark.exhaustive
def test_a_killed_training_ends_as_one_left_alone(learned: RunFolder) -> None:
    """Its process ended with it, and another one played the episodes that were lost, and those that came after."""
    check_that_it_ended_alike(killed_and_resumed(learned.path.parent, "verifiers_runner.py"), learned)
