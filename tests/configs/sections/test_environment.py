"""What does not go together with an environment is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.training import check_environment, check_inputs, check_reward
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig

GAME = {"type": "penstock.environments.calculator:Calculator"}
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"environment": GAME, "rollout": {"tensor_parallel": 2}}, "needs 'rollout.tensor_parallel' 1"),
        ({"environment": GAME, "rollout": {"ignore_eos": True}}, "'rollout.ignore_eos' leaves no end"),
        ({"environment": GAME, "data": {"too_long": "left"}}, "'data.too_long' left does not go with"),
        ({"data": {"arithmetic": {"calls": 0.5}}}, "'data.arithmetic.calls' needs an 'environment'"),
        (
            {"environment": GAME, "data": {"arithmetic": {"calls": 0.5, "mistakes": 0.1}}},
            "'calls' and 'mistakes' are different teachers",
        ),
        ({"environment": {**GAME, "max_turns": 0}}, "max_turns"),
        ({"environment": {}}, "type"),
    ],
)
def test_refusals(sections: dict[str, Any], message: str) -> None:
    """Control: the sections without the mistake pass, below."""
    with pytest.raises(ValueError, match=message):
        TrainConfig(**sections)


def test_an_environment_may_be_the_only_reward() -> None:
    """Or stand beside a function. Control: without it there has to be one."""
    check_reward(TrainConfig(environment=GAME), [])
    both = TrainConfig(environment=GAME, reward={"function": "penstock.rewards.builtin:exact_match"})
    check_reward(both, ["answer"])
    with pytest.raises(UserError, match="no reward"):
        check_reward(TrainConfig(), [])
    with pytest.raises(UserError, match="asks for 'answer'"):
        check_reward(both, [])


def test_the_environment_is_loaded_before_anything_starts() -> None:
    """With its settings."""
    check_environment(TrainConfig(environment={**GAME, "settings": {"penalty": 0.1}}))
    with pytest.raises(UserError, match="unexpected keyword argument 'bonus'"):
        check_environment(TrainConfig(environment={**GAME, "settings": {"bonus": 0.1}}))


def test_an_agents_episodes_cannot_go_on_under_the_next_policies() -> None:
    """Neither carried nor ahead of the update. Control: an environment's may, and an agent's may wait in the tail."""
    agent = {"type": "penstock.environments.calculator:CalculatorAgent"}
    apart = {"groups": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}}}
    for rollout, sections in (({"carry": {}}, {}), ({"stream": {"staleness": 1}}, apart)):
        with pytest.raises(
            UserError, match="CalculatorAgent' asks the policy for its turns, and such an episode cannot"
        ):
            check_environment(TrainConfig(environment=agent, rollout=rollout, **sections))
        check_environment(TrainConfig(environment=GAME, rollout=rollout, **sections))
    check_environment(TrainConfig(environment=agent, rollout={"tail": {}}))


def test_the_calculator_recipe_passes_every_check() -> None:
    """As `--dry-run` looks at it."""
    check_inputs(load_config(ROOT / "configs" / "calculator.yaml"))
