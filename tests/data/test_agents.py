"""Rows to agents: numbers in the order of the names; a row of nobody is refused by its value."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.checks.data import check_agents
from penstock.checks.prompts import read_prompts
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.data import AgentsConfig
from penstock.data.agents import agent_numbers

AGENTS = AgentsConfig(column="role", names=["solver", "2"])


def test_every_row_gets_its_agents_number() -> None:
    frame = pd.DataFrame({"role": ["2", "solver", 2]})
    numbers = agent_numbers(frame, AGENTS, "data.train")
    assert numbers.tolist() == [1, 0, 1]
    assert numbers.dtype == np.int64


def test_a_row_of_nobody_is_refused() -> None:
    with pytest.raises(UserError, match="'role' has the value 'critic'(.|\n)*solver, 2"):
        agent_numbers(pd.DataFrame({"role": ["solver", "critic"]}), AGENTS, "rows.jsonl")
    with pytest.raises(UserError, match=r"rows.jsonl has no column 'role'"):
        agent_numbers(pd.DataFrame({"prompt": ["a"]}), AGENTS, "rows.jsonl")


def test_agents_and_ippo_come_together(request: pytest.FixtureRequest) -> None:
    """Each without the other is refused; the recipe has both, and its data name these agents and no others."""
    agents = {"column": "carries", "names": ["0", "1"]}
    with pytest.raises(ValueError, match=r"'ippo' needs 'data\.agents'"):
        TrainConfig.model_validate({"algorithm": {"name": "ippo"}})
    with pytest.raises(ValueError, match=r"'data\.agents' has no effect with algorithm 'ppo'"):
        TrainConfig.model_validate({"algorithm": {"name": "ppo"}, "data": {"agents": agents}})
    with pytest.raises(ValueError, match="has '0' twice"):
        AgentsConfig(column="carries", names=["0", "1", "0"])
    with pytest.raises(ValueError, match="should match pattern"):
        AgentsConfig(column="carries", names=["../actor"])
    recipe = load_config(request.config.rootpath / "configs" / "ippo_arithmetic.yaml")
    check_agents(recipe, read_prompts(recipe)["train"])
    assert recipe.agents == ["0", "1", "2"]
    fewer = {**recipe.model_dump(), "data": {**recipe.data.model_dump(), "agents": agents}}
    with pytest.raises(UserError, match="'carries' has the value '2'"):
        check_agents(TrainConfig.model_validate(fewer), read_prompts(recipe)["train"])
