"""A server of OpenEnv as a whole training: a chat model that often writes wrong programs learns to write right ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.environments.openenv_servers import FILE
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder
from tests.gateway.chat_training import (
    DIGITS,
    check_that_it_ended_alike,
    check_that_it_learnt,
    killed_and_resumed,
    trained,
)
from tests.gateway.openenv_interpreter import openenv_python as openenv_python
from tests.gateway.openenv_interpreter import uvicorn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,  # tests/environments has the ways to a server, verifiers have a whole training
    pytest.mark.xdist_group("openenv"),
    pytest.mark.timeout(600),
]

SERVERS = Path(__file__).resolve().parents[1] / "environments"


def says(row: dict[str, Any], right: bool, generator: np.random.Generator) -> list[dict[str, Any]]:
    a, b = row["prompt"].removeprefix("What is ").rstrip("?").split("+")
    if not right:
        a, b = generator.integers(0, DIGITS), generator.integers(0, DIGITS)
    return [{**row, "response": f"print({a}+{b})"}]


@pytest.fixture(scope="module")
def learned(prefect_harness: None, openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training on the coding environment, whose server each worker starts."""
    folder = tmp_path_factory.mktemp("programs")
    coding = uvicorn(openenv_python, "openenv_examples:coding", SERVERS, SESSIONS="128")
    (folder / FILE).write_text(json.dumps({"servers": {"coding": coding}}))
    settings = {"server": "coding", "action": "code", "observation": ["stdout", "stderr"], "opening": False}
    environment = {
        "type": "penstock.environments.openenv:Gym",
        "settings": {**settings, "reset": ["wanted"]},
        "max_turns": 1,
        "timeout_s": 120,
    }
    return trained(folder, environment, says)


def test_the_held_out_reward_rises(learned: RunFolder) -> None:
    """Of programs that print the sum, which the server runs."""
    check_that_it_learnt(learned)


def test_rewards_are_the_servers(learned: RunFolder) -> None:
    """What a right program earns and what any other costs. Control: both are among them."""
    columns = read_columns(learned.experience(1), ["prompt", "response", "reward"])
    for prompt, said, reward in zip(columns["prompt"], columns["response"], columns["reward"].tolist(), strict=True):
        a, b = map(int, prompt.partition("What is ")[2].partition("?")[0].split("+"))
        numbers = said.removeprefix("print(").removesuffix(")").split("+")
        right = said == f"print({'+'.join(numbers)})" and all(n.isdigit() for n in numbers)
        assert reward == (1.0 if right and sum(map(int, numbers)) == a + b else -0.25)
    assert 0.1 < float((columns["reward"] == 1).mean()) < 0.8


def test_a_killed_training_ends_as_one_left_alone(learned: RunFolder) -> None:
    """Its server ended with it, and another one played the episodes that were lost, and those that came after."""
    check_that_it_ended_alike(killed_and_resumed(learned.path.parent, "openenv_examples:coding"), learned)
