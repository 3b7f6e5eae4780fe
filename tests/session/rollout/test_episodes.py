"""Rewards of episodes: the environment's, the reward source's, or both; too many failures stop the training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import Asked, Episodes
from penstock.rewards.pool import Score
from penstock.session.rollout.episodes import episode_columns, episode_figures, with_environment

NONE = float("nan")


def config_of(**reward: Any) -> TrainConfig:
    settings = {"failure_value": -1.0, "max_failure_share": 0.5, **reward}
    return TrainConfig(**{"environment": {"type": "my_game:Game"}, "reward": settings})


def game_of(max_failure_share: float = 0.5) -> TrainConfig:
    game = {"type": "my_game:Game", "agents": ["a", "b"]}
    return TrainConfig(environment=game, reward={"max_failure_share": max_failure_share})


def columns_of(*rewards: float, failures: dict[int, str] | None = None, **parts: list[float]) -> dict[str, Any]:
    return {
        "sample_id": [f"s{row}" for row in range(len(rewards))],
        "turns": np.ones(len(rewards), np.int64),
        "environment_reward": np.asarray(rewards),
        "environment_failure": [(failures or {}).get(row) for row in range(len(rewards))],
        **{f"environment/{name}": np.asarray(values) for name, values in parts.items()},
    }


def test_the_environment_alone() -> None:
    """Its sum is the reward; a failed episode gets the failure value, one without any reward 0."""
    columns = columns_of(1.5, NONE, NONE, failures={2: "it broke"}, right=[1.0, NONE, NONE], polite=[0.5, NONE, NONE])
    assert with_environment(config_of(), columns, None) == [
        Score(1.5, {"right": 1.0, "polite": 0.5}, None),
        Score(0.0, {}, None),
        Score(-1.0, {}, "environment: it broke"),
    ]


def test_the_environment_and_a_reward_function() -> None:
    """Both are added, and each is at least one part; whichever fails, the sample has failed."""
    scores = [Score(1.0, {}, None), Score(0.5, {"tone": 0.5}, None), Score(-1.0, {}, "bad"), Score(1.0, {}, None)]
    columns = columns_of(0.25, 2.0, 1.0, NONE, failures={3: "it broke"}, right=[NONE, 1.0, 1.0, NONE])
    columns["environment/reward"] = np.array([NONE, 2.0, 1.0, NONE])
    assert with_environment(config_of(), columns, scores) == [
        Score(1.25, {"response": 1.0, "environment": 0.25}, None),
        Score(2.5, {"tone": 0.5, "right": 1.0}, None),
        Score(-1.0, {}, "bad"),
        Score(-1.0, {}, "environment: it broke"),
    ]


def test_too_many_failures_stop_the_training(caplog: pytest.LogCaptureFixture) -> None:
    """More than the share, naming the first; each is logged. Control: exactly the share goes on."""
    with_environment(config_of(), columns_of(1.0, 1.0, NONE, NONE, failures={2: "x", 3: "y"}), None)
    assert [record.message for record in caplog.records] == [
        "environment failed: sample s2: x",
        "environment failed: sample s3: y",
    ]
    with pytest.raises(UserError, match=r"'my_game:Game' failed in 3 of 4 episodes.*50%:\n    sample s1: x"):
        with_environment(config_of(), columns_of(1.0, NONE, NONE, NONE, failures=dict.fromkeys((1, 2, 3), "x")), None)


def test_a_game_fails_once(caplog: pytest.LogCaptureFixture) -> None:
    """And not once for each agent: in the figure, in the log, in the message. Control: rows of who plays alone."""
    columns = columns_of(1.0, NONE, 1.0, NONE, failures={1: "x", 3: "x"})
    columns |= {"loss_mask": Ragged.of([[1]] * 4, np.uint8), "agent": np.array([0, 0, 1, 1])}
    columns["unbridged_turns"] = np.zeros(4, np.int64)
    for of, conversations, failed in ((game_of, 2, ["s1"]), (config_of, 1, ["s1", "s3"])):
        caplog.clear()
        with_environment(of(max_failure_share=0.5), columns, None)
        assert [record.message for record in caplog.records] == [f"environment failed: sample {n}: x" for n in failed]
        figures = episode_figures(columns, conversations)
        assert figures["rollout/environment_failures"] == len(failed)
        assert ("rollout/unbridged_turns" in figures) == (conversations == 1)
        with pytest.raises(UserError, match=f"failed in {len(failed)} of {4 // conversations} episodes"):
            with_environment(of(max_failure_share=0.25), columns, None)


def test_no_reward_at_all_is_a_mistake() -> None:
    """Unless a reward function gives some."""
    with pytest.raises(UserError, match="gave no reward in any of 2 episodes"):
        with_environment(config_of(), columns_of(NONE, NONE), None)
    scores = [Score(1.0, {}, None)] * 2
    assert [item.reward for item in with_environment(config_of(), columns_of(NONE, NONE), scores)] == [1.0, 1.0]


def test_a_game_that_pays_nobody_is_told_how_games_pay() -> None:
    """By name, since a reward function does not go with them. Control: the advice for one who plays alone."""
    for config, advice, other in (
        (game_of(), r"1 episodes.*\n.*rewards=\{'a': ...\}", "function"),
        (config_of(), r"2 episodes.*\n.*reward=\.\.\.\), or add reward.function", "rewards="),
    ):
        with pytest.raises(UserError, match=advice) as caught:
            with_environment(config, {**columns_of(NONE, NONE), "agent": np.array([0, 1])}, None)
        assert other not in str(caught.value)


def test_columns_of_all_engines_come_in_the_order_of_the_rows() -> None:
    """Parts that only some episodes have are NaN in the others; without episodes there are none."""
    mask_T = np.empty(0, np.uint8)
    played = [
        Episodes(mask_T, np.array([1, 2]), np.array([1.0, 2.0]), [{"right": 1.0}, {}], [None, "late"], 0.0),
        Episodes(mask_T, np.array([3]), np.array([3.0]), [{"kind": 3.0}], [None], 0.0),
    ]
    columns = episode_columns(played, np.array([2, 0, 1]))
    assert columns["turns"].tolist() == [3, 1, 2]
    assert columns["environment_reward"].tolist() == [3.0, 1.0, 2.0]
    assert columns["environment_failure"] == [None, None, "late"]
    np.testing.assert_array_equal(columns["environment/right"], [NONE, 1.0, NONE])
    np.testing.assert_array_equal(columns["environment/kind"], [3.0, NONE, NONE])
    assert episode_columns([], np.array([0])) == {}

    mask = Ragged.of([[1, 0], [1, 1], [0, 1, 1, 1]], np.uint8)
    assert episode_figures({**columns, "loss_mask": mask}) == {
        "rollout/turns_mean": 2.0,
        "rollout/turns_max": 3.0,
        "rollout/observation_share": 0.25,
        "rollout/environment_failures": 1.0,
    }
    assert episode_figures({"loss_mask": mask}) == {}


def test_turns_that_did_not_follow_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of agents alone: a column, a figure and a line for each episode. Control: other environments have none."""
    mask_T, brought = np.empty(0, np.uint8), Ragged.of([[1], [2], [3]], np.int32)
    others = Episodes(mask_T, np.array([1, 2, 3]), np.ones(3), [{}] * 3, [None] * 3, 0.0)
    agents = replace(others, asked=Asked(brought, ["x"] * 3, np.array([0, 2, 0])))
    mask = Ragged.of([[1], [1], [1]], np.uint8)
    for played, counted in ((agents, 2.0), (others, None)):
        columns = {**columns_of(1.0, 1.0, 1.0), **episode_columns([played], np.array([2, 1, 0]))}
        assert episode_figures({**columns, "loss_mask": mask}).get("rollout/unbridged_turns") == counted
        with_environment(config_of(), columns, None)
    told = "turns that did not follow those before, and are not learnt from: sample s1: 2"
    assert [record.message for record in caplog.records] == [told]


def test_refused_requests_are_counted_and_no_parts_of_the_reward() -> None:
    """Of all agents together. Control: where nothing was refused there is no such figure."""
    mask = Ragged.of([[1], [1], [1]], np.uint8)
    columns = columns_of(1.0, 0.0, 1.0, **{"requests/refused": [3.0, NONE, 1.0], "right": [1.0, 0.0, 1.0]})
    assert episode_figures({**columns, "loss_mask": mask})["rollout/refused_requests"] == 4
    scores = with_environment(config_of(), columns, None)
    assert [score.parts for score in scores] == [{"right": value} for value in (1.0, 0.0, 1.0)]
    assert "rollout/refused_requests" not in episode_figures({**columns_of(1.0, 1.0, 1.0), "loss_mask": mask})


def test_calls_of_tools_are_counted_and_no_parts_of_the_reward() -> None:
    """Calls of an episode, and the share that went wrong. Control: without tools there are no such figures."""
    mask = Ragged.of([[1], [1], [1]], np.uint8)
    parts = {"tools/calls": [3.0, 1.0, NONE], "tools/errors": [1.0, 0.0, NONE], "right": [1.0, 0.0, 1.0]}
    columns = columns_of(1.0, 0.0, 1.0, **parts)
    figures = episode_figures({**columns, "loss_mask": mask})
    assert figures["rollout/tool_calls_mean"] == 4 / 3 and figures["rollout/tool_error_share"] == 0.25
    assert [score.parts for score in with_environment(config_of(), columns, None)] == [
        {"right": value} for value in (1.0, 0.0, 1.0)
    ]
    assert "rollout/tool_calls_mean" not in episode_figures({**columns_of(1.0, 1.0, 1.0), "loss_mask": mask})
