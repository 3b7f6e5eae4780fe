"""The group filter: which groups are refused, and that a refused group teaches nothing without weighing on the others.

Invariant: what divides the loss does not depend on how many groups are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.algorithm import AlgorithmConfig
from penstock.data.group_filters import load_filter
from penstock.data.prompts import PromptTable
from penstock.session.rollout.refused_groups import judged_columns, refused_groups
from penstock.session.session import Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import ExperienceRef, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.advantage import advantage

REWARDS = [[1.0, 0.0], [1.0, 1.0], [0.1, 0.1], [0.0, 0.5], [0.9, 0.8]]
RESPONSES = ["x", "y", "x", "x", "x", "y", "x", "x", "x", "x"]
TOPICS = ["usual", "usual", "usual", "usual", "rare"]
EXAMPLES = "tests.session.rollout.filter_examples"
Judge = Callable[[dict[str, Any]], Training]


@pytest.fixture
def judging(training_with: Callable[[TrainConfig], Training], tmp_path: Path) -> Judge:
    """Make a training with an `algorithm` section, and experience of five groups of two in its folder."""

    def make(algorithm: dict[str, Any]) -> Training:
        values = {"rollout": {"prompts": 5, "samples": 2}, "algorithm": algorithm}
        training = training_with(TrainConfig.model_validate(values))
        ids = [f"p{group}" for group in range(5)]
        frame = pd.DataFrame({"prompt_id": ids, "prompt_text": ids, "prompt_tokens": [[1]] * 5, "topic": TOPICS})
        training.session().prompts["train"] = PromptTable(frame, 0)
        return training

    lengths_B = np.arange(1, 11)
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
    columns = {
        "reward": np.asarray(REWARDS).reshape(-1),
        "reward/form": np.array([1.0, 1, 0, 1, 1, 1, 0, 1, 1, 1]),
        "prompt": [f"prompt {row // 2}" for row in range(10)],
        "prompt_id": [f"p{row // 2}" for row in range(10)],
        "response": RESPONSES,
        "group": np.repeat(np.arange(5), 2),
        "loss_mask": Ragged(np.ones(lengths_B.sum(), np.uint8), offsets_B1),
    }
    write_columns(tmp_path / "experience.parquet", columns)
    return make


def refused(training: Training) -> list[int]:
    """The groups that are refused."""
    path = training.run.path / "experience.parquet"
    return np.flatnonzero(refused_groups(training, judged_columns(path))).tolist()


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        ({}, [1, 2]),
        ({"mean_reward": [0.25, 0.9]}, [1, 2]),
        ({"equal_rewards": False, "mean_reward": [0.1, 0.5]}, [1, 4]),
        ({"mean_reward": [0.3, 1.0]}, [1, 2, 3]),
        ({"equal_rewards": False, "function": f"{EXAMPLES}:varied"}, [1, 3]),
        ({"equal_rewards": False, "function": f"{EXAMPLES}:varied", "settings": {"least": 3}}, [0, 1, 2, 3]),
        ({"function": f"{EXAMPLES}:varied"}, [1, 2, 3]),
        ({"equal_rewards": False, "function": f"{EXAMPLES}:by_part"}, [0, 2, 4]),
    ],
)
def test_groups_are_refused_by_their_rewards(judging: Judge, dynamic: dict[str, Any], expected: list[int]) -> None:
    """Bounds belong to the band; conditions add up; without the section none is refused."""
    assert refused(judging({"name": "rloo", "dynamic_sampling": dynamic})) == expected
    assert refused(judging({"name": "rloo"})) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [("undecided", r"returned .*0\.5.*\n.*return true to keep"), ("raises", r"failed for prompt p0: KeyError: 'p0'")],
)
def test_a_function_that_fails_is_the_users_error(judging: Judge, function: str, message: str) -> None:
    dynamic = {"function": f"{EXAMPLES}:{function}", "equal_rewards": False}
    with pytest.raises(UserError, match=message):
        refused(judging({"name": "rloo", "dynamic_sampling": dynamic}))


def test_a_function_that_does_not_fit_is_refused_before_it_is_called() -> None:
    dynamic = {"name": "rloo", "dynamic_sampling": {"function": f"{EXAMPLES}:asks_for_more"}}
    config = AlgorithmConfig.model_validate(dynamic).dynamic_sampling
    assert config is not None
    with pytest.raises(UserError, match="asks for 'tokens', which is neither an argument of filters nor a setting"):
        load_filter(config)


# ---- what becomes of groups that stay --------------------------------------------------------------------------------


def estimated(training: Training) -> tuple[dict[str, Any], dict[str, float]]:
    """Columns and figures of the advantage task."""
    path = training.run.path / "experience.parquet"
    settings = settings_at(training.config, 1, Progress())
    stage = advantage.fn(training, settings, Stage(ExperienceRef(str(path), 10, 0, 55, 0, prompts=5), {}), [])
    return read_columns(path, ["advantages", "refused", "loss_mask"]), stage.metrics


def test_a_refused_group_that_stays_has_no_advantage_and_still_counts(judging: Judge) -> None:
    """Advantages of the others and all masks are those of a training that refuses nothing."""
    dynamic = {"mean_reward": [0.3, 1.0], "max_rollouts": 1}
    columns, figures = estimated(judging({"name": "rloo", "dynamic_sampling": dynamic}))
    assert figures["rollout/groups_refused"] == 3
    assert columns["refused"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    firsts = columns["advantages"].values_T[columns["advantages"].offsets_B1[:-1]]
    np.testing.assert_allclose(firsts, [1, -1, 0, 0, 0, 0, 0, 0, 0.1, -0.1], atol=1e-6)
    assert columns["loss_mask"].values_T.all()


def test_of_a_refused_group_nothing_is_accepted(judging: Judge) -> None:
    """Accepted are the best of groups 0 and 4, and not that of group 3, which is refused. Control: it would be."""
    dynamic = {"mean_reward": [0.3, 1.0]}
    training = judging({"name": "best_of_n", "dynamic_sampling": dynamic})
    estimated(training)
    path = training.run.path / "experience.parquet"
    assert read_columns(path, ["accepted"])["accepted"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    training = judging({"name": "best_of_n", "dynamic_sampling": {}})
    estimated(training)
    assert read_columns(path, ["accepted"])["accepted"].tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1, 0]


# ---- settings that would change nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "ppo", "dynamic_sampling": {}}, "compares no samples: give it 'mean_reward' or 'function'"),
        (
            {"name": "rft", "dynamic_sampling": {"equal_rewards": True, "mean_reward": [0.1, 1]}},
            "compares no samples: remove 'equal_rewards'",
        ),
        ({"dynamic_sampling": {"equal_rewards": False}}, "refuses no group"),
        ({"dynamic_sampling": {"max_rollouts": 1}}, "'dynamic_sampling.max_rollouts' 1 has no effect"),
        ({"dynamic_sampling": {"mean_reward": [0.9, 0.1]}}, "the second not below the first"),
        ({"dynamic_sampling": {"settings": {"least": 3}}}, "'settings' has no effect without 'function'"),
    ],
)
def test_a_filter_without_effect_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(algorithm)


def test_what_follows_from_the_algorithm_is_filled_in() -> None:
    """Resolved twice is resolved once."""
    for name, expected in (("grpo", True), ("rft", False), ("ppo", False)):
        config = AlgorithmConfig.model_validate({"name": name, "dynamic_sampling": {"mean_reward": [0.1, 0.9]}})
        assert config.dynamic_sampling is not None
        assert config.dynamic_sampling.equal_rewards is expected
        assert AlgorithmConfig.model_validate(config.model_dump()) == config
