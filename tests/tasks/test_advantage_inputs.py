"""From experience columns to an estimator and back: each reads what it needs, and the figures say what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.advantages.types import Advantages
from configs.algorithm import AlgorithmConfig
from configs.errors import UserError
from configs.schema import TrainConfig
from rewards.scoring import Score
from state.experience import Ragged, write_columns
from tasks import advantage as module
from tasks.greedy_baseline import GREEDY_REWARD
from tasks.reward import punished, reward_columns

OFFSETS_B1 = np.array([0, 2, 3, 5, 6])
COLUMNS: dict[str, Any] = {
    "reward": np.array([1.0, 0.0, 2.0, 2.0]),
    "group": np.array([0, 0, 1, 1]),
    "loss_mask": Ragged(np.ones(6, np.uint8), OFFSETS_B1),
    "reward/right": np.array([1.0, 0.0, 0.0, np.nan]),
    "reward/overlong": np.array([0.0, -1.0, 0.0, 0.0]),
    "reward/reward": np.array([1.0, 0.0, 2.0, 2.0]),
    GREEDY_REWARD: np.array([1.0, 1.0, 0.5, 0.5]),
}
OLD_T = np.log(np.linspace(0.2, 0.9, 6)).astype(np.float32)


def estimated(tmp_path: Path, algorithm: dict[str, Any], absent: tuple[str, ...] = ()) -> tuple[Any, Advantages]:
    path = tmp_path / "experience.parquet"
    write_columns(path, {name: column for name, column in COLUMNS.items() if name not in absent})
    config = AlgorithmConfig.model_validate(algorithm)
    passes = {"logprobs_old": Ragged(OLD_T, OFFSETS_B1), "values": Ragged(np.zeros(6, np.float32), OFFSETS_B1)}
    inputs = module._inputs(path, passes, config, 0.0)
    return inputs, module._estimate(inputs, config)


def test_remax_reads_the_reward_of_the_greedy_response(tmp_path: Path) -> None:
    _, result = estimated(tmp_path, {"name": "remax"})
    assert result.advantages_T.tolist() == [0, 0, -1, 1.5, 1.5, 1.5]
    with pytest.raises(KeyError, match=GREEDY_REWARD):
        estimated(tmp_path, {"name": "remax"}, absent=(GREEDY_REWARD,))


def test_otb_reads_the_log_probs_of_the_generating_policy(tmp_path: Path) -> None:
    inputs, result = estimated(tmp_path, {"name": "otb"})
    np.testing.assert_array_equal(inputs.old_logprobs_T, OLD_T)
    weights = [(1 - 0.2) ** 2, (1 - 0.48) ** 2]  # of the first tokens of rows 0 and 1
    assert result.advantages_T[2] == pytest.approx(0 - weights[0] / sum(weights), rel=1e-6)


def test_gdpo_reads_parts_but_not_the_total_beside_them(tmp_path: Path) -> None:
    inputs, result = estimated(tmp_path, {"name": "gdpo"})
    assert set(inputs.parts_B) == {"right", "overlong"}
    assert result.advantages_T[0] > 0 > result.advantages_T[2]
    one, _ = estimated(tmp_path, {"name": "gdpo", "part_weights": {"right": 2.0}})
    assert set(one.parts_B) == {"right", "overlong"}


@pytest.mark.parametrize(
    ("algorithm", "absent", "message"),
    [
        ({}, ("reward/right",), "needs rewards of several parts"),  # the penalty alone is no reward
        ({"part_weights": {"form": 1.0}}, (), "names 'form', which is no part of the reward"),
        ({"part_weights": {"reward": 1.0}}, (), "names 'reward', which is no part of the reward"),
    ],
)
def test_parts_that_are_not_there_are_the_users_error(
    tmp_path: Path, algorithm: dict[str, Any], absent: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        estimated(tmp_path, {"name": "gdpo", **algorithm}, absent)


def test_figures_of_the_advantages(tmp_path: Path) -> None:
    """Group 1 has equal rewards: both of its rows, half of all, teach nothing."""
    inputs, result = estimated(tmp_path, {"name": "grpo", "normalize_by_std": False})
    figures = module._spread(inputs, result)
    assert result.advantages_T.tolist() == [0.5, 0.5, -0.5, 0, 0, 0]
    assert figures["advantage/zero_share"] == 0.5
    assert figures["advantage/mean"] == pytest.approx(0.5 / 6)
    assert figures["advantage/std"] == pytest.approx(np.std([0.5, 0.5, -0.5, 0, 0, 0]))


def test_long_responses_lose_reward_and_failed_ones_keep_theirs() -> None:
    """Limit 10, buffer 4, penalty 0.5: 8 tokens lose a half of it. Control: without the section nothing changes."""
    scores = [Score(1.0, {"right": 1.0}, None), Score(1.0, {}, None), Score(0.0, {}, "timeout")]
    lengths_B = np.array([8, 6, 10])
    overlong = {"rollout": {"max_response_tokens": 10}, "reward": {"overlong": {"buffer_tokens": 4, "penalty": 0.5}}}
    columns = reward_columns(punished(TrainConfig.model_validate(overlong), scores, lengths_B))
    assert columns["reward"].tolist() == [0.75, 1.0, 0.0]
    np.testing.assert_array_equal(columns["reward/overlong"], [-0.25, 0.0, np.nan])
    assert columns["reward/right"][0] == 1.0
    assert punished(TrainConfig(), scores, lengths_B) is scores
