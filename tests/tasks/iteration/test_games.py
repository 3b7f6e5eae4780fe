"""Experience of games: each agent's samples of a prompt are a group, so no agent's advantages hear of another's pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from penstock.algorithms.advantages.critics.ippo import ippo
from penstock.algorithms.advantages.groups.grpo import grpo
from penstock.algorithms.advantages.types import AdvantageInputs
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.engines.commands.rollout import Asked
from penstock.rewards.pool import Score
from penstock.session.rollout.generation import Responses, rows_in_prompt_order
from penstock.session.session import Stage, Training
from penstock.session.settings import next_settings, settings_at
from penstock.state.experience import AGENT, ExperienceRef, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.evaluate import evaluated, held_out
from penstock.tasks.iteration.reward import reward
from penstock.tasks.iteration.rollout import experience_columns

PROMPTS, AGENTS, SAMPLES = 2, 2, 3
ROWS = PROMPTS * AGENTS * SAMPLES
GAME = {"type": "penstock.environments.games.checked_sums:CheckedSums", "agents": ["solver", "checker"]}
REWARDS_B = np.array([1, 0, 0, 5, 6, 7, 0, 1, 1, 9, 9, 6], np.float64)
FRAME = pd.DataFrame(
    {"prompt_id": ["p0", "p1"], "prompt_text": ["x", "y"], "prompt_tokens": [np.array([1]), np.array([2])]}
)


def responses() -> Responses:
    """What engines reply about games, one token a row; each row has a prompt of its own."""
    tokens = Ragged.of([[row] for row in range(ROWS)], np.int32)
    prompts = Ragged.of([[100 + row] for row in range(ROWS)], np.int32)
    asked = Asked(prompts, [f"q{row}" for row in range(ROWS)], np.zeros(ROWS, np.int64))
    texts = pa.array([str(row) for row in range(ROWS)], pa.large_string())
    mask = Ragged(np.ones(ROWS, np.uint8), tokens.offsets_B1)
    return Responses(np.arange(PROMPTS), tokens, texts, np.zeros(ROWS, bool), 0, {}, mask, {}, asked=asked)


def columns_of(training_with: Callable[[TrainConfig], Training], **sections: Any) -> dict[str, Any]:
    config = TrainConfig(environment=GAME, rollout={"prompts": PROMPTS, "samples": SAMPLES}, **sections)
    training = training_with(config)
    start = Progress(iteration=0, policy_version=0, prompt_cursor=0)
    return experience_columns(training, next_settings(training, start), FRAME, responses())


def inputs_of(columns: dict[str, Any], rewards_B: np.ndarray) -> AdvantageInputs:
    return AdvantageInputs(
        rewards_B=rewards_B,
        token_rewards_T=np.zeros(ROWS),
        mask_T=np.ones(ROWS),
        offsets_B1=np.arange(ROWS + 1),
        groups_B=columns["group"],
        values_T=np.zeros(ROWS),
        agents_B=columns[AGENT],
    )


def test_rows_are_by_prompt_agent_and_sample(training_with: Callable[[TrainConfig], Training]) -> None:
    """Each row has its own prompt; a prompt and an agent are a group. Names of rows are all different."""
    columns = columns_of(training_with)
    assert columns[AGENT].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert columns["group"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert columns["prompt_id"] == ["p0"] * 6 + ["p1"] * 6
    assert columns["prompt"] == [f"q{row}" for row in range(ROWS)]
    assert len(set(columns["sample_id"])) == ROWS


def test_an_agents_advantages_do_not_hear_of_the_others_pay(training_with: Callable[[TrainConfig], Training]) -> None:
    """By group and by critic alike. Control: with both agents in a group, or one agent, they would."""
    columns = columns_of(training_with, algorithm={"name": "ippo"})
    solvers_B = columns[AGENT] == 0
    louder_B = np.where(solvers_B, REWARDS_B, 1000 * REWARDS_B)
    mixed = {"group": np.repeat(np.arange(PROMPTS), AGENTS * SAMPLES), AGENT: np.zeros(ROWS, np.int64)}
    for estimate in (grpo, ippo):
        quiet, loud = (estimate(inputs_of(columns, rewards_B)).advantages_T for rewards_B in (REWARDS_B, louder_B))
        np.testing.assert_array_equal(quiet[solvers_B], loud[solvers_B])
        quiet, loud = (estimate(inputs_of(mixed, rewards_B)).advantages_T for rewards_B in (REWARDS_B, louder_B))
        assert np.abs(quiet - loud)[solvers_B].max() > 0.1
    by_hand = REWARDS_B.reshape(-1, SAMPLES) - REWARDS_B.reshape(-1, SAMPLES).mean(axis=1, keepdims=True)
    advantages_T = grpo(inputs_of(columns, REWARDS_B), normalize_by_std=False).advantages_T
    np.testing.assert_allclose(advantages_T, by_hand.ravel(), atol=1e-6)


def test_replies_of_engines_are_put_in_the_order_of_the_prompts() -> None:
    """All rows of a prompt stay together. Control: rows of one conversation alone would be too few."""
    positions = [np.array([1]), np.array([0])]
    rows_B = rows_in_prompt_order(positions, PROMPTS, SAMPLES * AGENTS)
    assert rows_B.tolist() == [*range(6, 12), *range(6)]
    assert len(rows_in_prompt_order(positions, PROMPTS, SAMPLES)) == ROWS // AGENTS


def test_an_evaluation_shows_what_each_agent_earned(training_with: Callable[[TrainConfig], Training]) -> None:
    """Beside the mean of both, whose interval is over prompts. Control: figures of several responses are not there."""
    evaluate = {"samples": SAMPLES, "temperature": 1.0, "evaluators": ["rewards"]}
    training = training_with(TrainConfig(environment=GAME, evaluate=evaluate))
    training.session().prompts["heldout"] = PromptTable(FRAME, 0)
    replied = responses()
    columns = {
        "prompt_id": ["p0"] * 6 + ["p1"] * 6,
        "prompt": ["q"] * ROWS,
        "response": replied.texts.to_pylist(),
    }
    scores = [Score(float(reward), {}, None) for reward in REWARDS_B]
    figures = evaluated(training, held_out(training, columns, replied, scores))
    assert figures["heldout/reward"] == REWARDS_B.mean()
    assert figures["heldout/solver/reward"] == 0.5
    assert figures["heldout/solver/accuracy"] == 0.5
    assert figures["heldout/checker/reward"] == 7.0
    assert (figures["heldout/checker/reward/low"], figures["heldout/checker/reward/high"]) == (6.0, 8.0)
    names = {"heldout/reward", "heldout/accuracy"}
    names |= {f"heldout/{agent}/{name}" for agent in GAME["agents"] for name in ("reward", "accuracy")}
    assert {name for name in figures if not name.endswith(("/low", "/high"))} == names


def test_what_each_agent_earned_is_a_figure_of_the_reward(training_with: Callable[[TrainConfig], Training]) -> None:
    """Beside the mean of both. Control: who plays alone."""
    rows = {
        "sample_id": [f"s{row}" for row in range(ROWS)],
        "prompt_id": ["p0"] * 6 + ["p1"] * 6,
        "prompt": ["q"] * ROWS,
        "response": ["a"] * ROWS,
        "turns": np.ones(ROWS, np.int64),
        "environment_reward": REWARDS_B,
        "environment_failure": [None] * ROWS,
        AGENT: np.array([0, 0, 0, 1, 1, 1] * 2),
    }
    figures = {}
    for name, game in (("game", GAME), ("alone", {"type": "penstock.environments.calculator:Calculator"})):
        training = training_with(TrainConfig(environment=game, rollout={"prompts": PROMPTS, "samples": SAMPLES}))
        training.session().prompts["train"] = PromptTable(FRAME, 0)
        path = training.run.experience(1)
        write_columns(path, rows)
        stage = Stage(ExperienceRef(str(path), ROWS, ROWS, ROWS, 0), {})
        figures[name] = reward.fn(training, settings_at(training.config, 1, Progress()), stage).metrics
    per_agent = {"reward/solver/mean": 0.5, "reward/checker/mean": 7.0}
    assert {name: figures["game"][name] for name in per_agent} == per_agent
    assert figures["game"]["reward/mean"] == sum(per_agent.values()) / 2
    assert not figures["alone"].keys() & per_agent.keys()
