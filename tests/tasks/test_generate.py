"""Prompts go to the ranks in contiguous shares, and their responses come back in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from configs.schema import TrainConfig
from state.experience import Ragged
from tasks.generate import generate
from tasks.session import Training

SAMPLES = 2


@dataclass
class Echo:
    """Ranks that answer a prompt with its first token, once for sample 0, twice for sample 1."""

    ranks: int
    commands: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(devices=(None,) * self.ranks)

    def call(self, command: str, key: str, per_rank: list[dict[str, Any]], tokenizer: str) -> list[dict[str, Any]]:
        self.commands.append({"command": command, "key": key, "per_rank": per_rank, "tokenizer": tokenizer})
        return [self.answer(**arguments) for arguments in per_rank]

    def answer(self, prompts: np.ndarray, offsets: np.ndarray, sampling: dict[str, Any]) -> dict[str, Any]:
        first = [int(row[0]) for row in np.split(prompts, offsets[1:-1])] if len(offsets) > 1 else []
        responses = Ragged.of([[token] * (n + 1) for token in first for n in range(sampling["samples"])], np.int32)
        count = len(responses)
        return {
            "tokens": responses.values_T,
            "offsets": responses.offsets_B1,
            "truncated": np.arange(count) % 2 == 1,
            "texts": [str(responses.row(row)[0]) for row in range(count)],
            "policy_version": 3,
        }


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_responses_come_back_in_prompt_order(training_with: Callable[[TrainConfig], Training], ranks: int) -> None:
    """However many ranks there are, also more than prompts."""
    training, group = training_with(TrainConfig()), Echo(ranks)
    training.session().groups["rollout"] = group  # type: ignore[assignment]
    training.session().model_folder = "model"
    prompts = pd.DataFrame({"prompt_tokens": [[10, 11], [20], [30, 31, 32], [40], [50, 51]]})
    responses = generate(training, prompts, "1/rollout", [0, 1, 0], {"samples": SAMPLES})

    rows = [responses.tokens.row(row).tolist() for row in range(len(responses.tokens))]
    assert rows == [[10], [10, 10], [20], [20, 20], [30], [30, 30], [40], [40, 40], [50], [50, 50]]
    assert responses.texts == [str(row[0]) for row in rows]
    assert responses.truncated_B.tolist() == [False, True] * 5
    assert responses.policy_version == 3

    (sent,) = group.commands
    sizes = [len(arguments["offsets"]) - 1 for arguments in sent["per_rank"]]
    assert max(sizes) - min(sizes) <= 1, "every rank has as much to do"
    assert len({arguments["sampling"]["seed"] for arguments in sent["per_rank"]}) == ranks, "no two ranks draw alike"


def test_the_seed_belongs_to_the_generation(training_with: Callable[[TrainConfig], Training]) -> None:
    """A repeated generation draws the same; another iteration, another purpose and another rank do not."""
    training, group = training_with(TrainConfig()), Echo(2)
    training.session().groups["rollout"] = group  # type: ignore[assignment]
    prompts = pd.DataFrame({"prompt_tokens": [[1], [2]]})
    for seed in ([0, 1, 0], [0, 1, 0], [0, 2, 0], [0, 1, 1]):
        generate(training, prompts, "key", seed, {"samples": SAMPLES})
    drawn = [[arguments["sampling"]["seed"] for arguments in sent["per_rank"]] for sent in group.commands]
    assert drawn[0] == drawn[1]
    assert len({seed for seeds in drawn for seed in seeds}) == 6
