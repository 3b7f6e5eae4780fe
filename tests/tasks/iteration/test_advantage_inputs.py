"""From experience columns to an estimator and back: each reads what it needs, and the figures say what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.advantages.types import Advantages
from penstock.base.bounds import LARGEST_REWARD
from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.algorithm import AlgorithmConfig
from penstock.rewards.pool import Score
from penstock.state.experience import AGENT, write_columns
from penstock.tasks.iteration import advantage as module
from penstock.tasks.iteration.greedy_baseline import GREEDY_REWARD
from penstock.tasks.iteration.reward import punished, reward_columns

OFFSETS_B1 = np.array([0, 2, 3, 5, 6])
COLUMNS: dict[str, Any] = {
    "reward": np.array([1.0, 0.0, 2.0, 2.0]),
    "group": np.array([0, 0, 1, 1]),
    "loss_mask": Ragged(np.ones(6, np.uint8), OFFSETS_B1),
    "reward/right": np.array([1.0, 0.0, 0.0, np.nan]),
    "reward/overlong": np.array([0.0, -1.0, 0.0, 0.0]),
    "reward/reward": np.array([1.0, 0.0, 2.0, 2.0]),
    GREEDY_REWARD: np.array([1.0, 1.0, 0.5, 0.5]),
    AGENT: np.array([1, 0, 1, 0]),
}
OLD_T = np.log(np.linspace(0.2, 0.9, 6)).astype(np.float32)


def estimated(tmp_path: Path, algorithm: dict[str, Any], absent: tuple[str, ...] = ()) -> tuple[Any, Advantages]:
    path = tmp_path / "experience.parquet"
    write_columns(path, {name: column for name, column in COLUMNS.items() if name not in absent})
    config = AlgorithmConfig.model_validate(algorithm)
    passes = {"logprobs_old": Ragged(OLD_T, OFFSETS_B1), "values": Ragged(np.zeros(6, np.float32), OFFSETS_B1)}
    inputs = module._inputs(path, passes, config, 0.0)
    return inputs, module._estimate(inputs, config.functions[0], config.settings_at(1))


@pytest.mark.parametrize(
    ("algorithm", "rewards", "words"),
    [
        ({"name": "grpo"}, [1e300, -1e300], "cannot be computed"),
        ({"name": "gdpo", "settings": {"part_weights": {"right": 1e300}}}, [1.0, 0.0], "cannot be computed"),
        ({"name": "opo"}, [1e300, -1e300], r"'opo' made advantages that are not finite .* from -1e\+300 to 1e\+300"),
        ({"name": "ppo", "settings": {"whiten": False}}, [1e300, -1e300], "made advantages that are not finite"),
    ],
)
def test_what_no_float_holds_is_an_error_and_not_an_advantage_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], rewards: list[float], words: str
) -> None:
    """An infinite deviation would silence a whole group. Control: the largest rewards that are let in."""
    monkeypatch.setitem(COLUMNS, "reward", np.array([*rewards, 2.0, 2.0]))
    with pytest.raises(UserError, match=words), np.errstate(over="ignore", invalid="ignore"):
        estimated(tmp_path, algorithm)
    monkeypatch.setitem(COLUMNS, "reward", np.array([LARGEST_REWARD, -LARGEST_REWARD, 2.0, 2.0]))
    _, result = estimated(
        tmp_path, {name: value for name, value in algorithm.items() if name != "settings" or "whiten" in value}
    )
    assert np.abs(result.advantages_T).max() > 0


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
    one, _ = estimated(tmp_path, {"name": "gdpo", "settings": {"part_weights": {"right": 2.0}}})
    assert set(one.parts_B) == {"right", "overlong"}


def test_ippo_reads_agents_and_shows_how_well_each_is_valued(tmp_path: Path) -> None:
    """Values are 0, so a row's returns are its reward: those of agent 0 are 0 and 2, of agent 1 twice 1 and twice 2."""
    inputs, result = estimated(tmp_path, {"name": "ippo", "settings": {"gae_lambda": 1.0}})
    assert inputs.agents_B.tolist() == [1, 0, 1, 0]
    assert result.advantages_T[inputs.offsets_B1[1]] == pytest.approx(-(0.5**0.5), rel=1e-6)
    better = dataclasses.replace(inputs, values_T=np.array([0, 0, 0.5, 0, 0, 1.5], np.float32))
    figures = module._figures(better, result, {}, ["solver", "checker"])
    assert figures["critic/solver/explained_variance"] == pytest.approx(0.75)  # off by a half, where returns vary by 1
    assert figures["critic/checker/explained_variance"] == pytest.approx(0)
    missed, returns = [1, 1, -0.5, 2, 2, 0.5], [1, 1, 0, 2, 2, 2]
    assert figures["critic/explained_variance"] == pytest.approx(1 - np.var(missed) / np.var(returns))
    assert estimated(tmp_path, {"name": "ppo"})[0].agents_B is None
    with pytest.raises(KeyError, match=AGENT):
        estimated(tmp_path, {"name": "ippo"}, absent=(AGENT,))


@pytest.mark.parametrize(
    ("algorithm", "absent", "message"),
    [
        ({}, ("reward/right",), "needs rewards of several parts"),  # the penalty alone is no reward
        ({"settings": {"part_weights": {"form": 1.0}}}, (), "names 'form', which is no part of the reward"),
        ({"settings": {"part_weights": {"reward": 1.0}}}, (), "names 'reward', which is no part of the reward"),
    ],
)
def test_parts_that_are_not_there_are_the_users_error(
    tmp_path: Path, algorithm: dict[str, Any], absent: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        estimated(tmp_path, {"name": "gdpo", **algorithm}, absent)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("grpo", {"advantage": "rloo"}),
        ("grpo", {"settings": {"normalize_by_std": False}}),
        ("ppo", {"settings": {"gamma": 0.5}}),
        ("ppo", {"settings": {"gae_lambda": 0.5}}),
        ("ppo", {"settings": {"whiten": False}}),
        ("gdpo", {"settings": {"part_weights": {"right": -1.0}}}),
        ("rft", {"settings": {"accept_reward": 1.5}}),
        ("rft", {"settings": {"accept_reward": {0: 1.5, 2: 1.0}}}),
    ],
)
def test_settings_reach_the_estimator(tmp_path: Path, name: str, given: dict[str, Any]) -> None:
    """Each changes the advantages; what they mean is shown where the estimators are."""
    before, after = (estimated(tmp_path, {"name": name, **extra})[1] for extra in ({}, given))
    assert not np.allclose(before.advantages_T, after.advantages_T)


def test_a_function_of_ones_own_is_called_with_its_settings(tmp_path: Path) -> None:
    """The medians of the groups are 0.5 and 2, the scale is the recipe's."""
    own = {"advantage": "tests.own_algorithm:above_median", "settings": {"scale": 4.0}}
    assert estimated(tmp_path, own)[1].advantages_T.tolist() == [2, 2, -2, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain_array", "returned ndarray, not"),
        ("plain_list", "advantages_T of type list, not an array"),
        ("per_row", r"shape \(4,\), not \(6,\)"),
        ("endless", "not finite"),
        ("raising", r"raised LookupError: no such column \(own_algorithm.py:\d+\)"),
    ],
)
def test_what_a_function_of_ones_own_returns_is_checked(tmp_path: Path, name: str, words: str) -> None:
    """Before anything is learnt from it; the control is the test before."""
    with pytest.raises(UserError, match=words):
        estimated(tmp_path, {"advantage": f"tests.own_algorithm:{name}"})


def test_figures_of_the_advantages(tmp_path: Path) -> None:
    """Group 1 has equal rewards: both of its rows, half of all, teach nothing."""
    inputs, result = estimated(tmp_path, {"name": "grpo", "settings": {"normalize_by_std": False}})
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
