"""A flow's parameters are the fields of its form, and what they are given becomes its configuration."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.parameters import FIELDS, fields_of_steps, with_form
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.section import Recipe
from penstock.flows.train import KEYS as OF_TRAIN

GIVEN = {
    "name": "mine",
    "model": "models/one",
    "data": "rows.jsonl",
    "iterations": 7,
    "steps": 9,
    "batch": 16,
    "learning_rate": 3e-7,
    "prompts": 60,
    "samples": 4,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("tree", "keys", "recipe"),
    [
        (TrainConfig, OF_TRAIN, "configs/grpo_gsm8k.yaml"),
        (TrainConfig, fields_of_steps("data.sft", "sft"), "configs/quickstart.yaml"),
        (PreferenceConfig, fields_of_steps("data.train", "trainer"), "configs/dpo.yaml"),
        (RewardModelConfig, fields_of_steps("data.train", "trainer"), "configs/reward_model.yaml"),
    ],
    ids=["train", "sft", "preference", "reward-model"],
)
def test_every_field_reaches_its_key(tree: type[Recipe], keys: dict[str, str], recipe: str) -> None:
    """One at a time, beside what the function takes itself. Control: without any the recipe's value stands there."""

    @with_form(tree, keys)
    def flow(config: Any, run_folder: str | None = None, resume: str | None = None) -> tuple[Any, str | None]:
        return config, run_folder

    parameters = [*signature(flow).parameters]
    assert parameters == ["config", "recipe", *keys, "overrides", "run_folder", "resume"]
    assert keys.keys() <= FIELDS.keys() == GIVEN.keys()
    plain, _ = flow(recipe=recipe)
    for name, key in keys.items():
        if (name, recipe) in (("data", "configs/quickstart.yaml"), ("model", "configs/quickstart.yaml")):
            continue  # its data and model are made, and nothing may stand beside that
        config, folder = flow(recipe=recipe, run_folder="there", **{name: GIVEN[name]})
        assert isinstance(config, tree) and folder == "there"
        assert at(config, key) == GIVEN[name] != at(plain, key)


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_a_whole_configuration_stays_what_it_is() -> None:
    """As the command line gives it, first and alone. Controls: a field beside it, a parameter that there is not."""

    @with_form(TrainConfig, OF_TRAIN)
    def flow(config: Any, resume: str | None = None) -> Any:
        return config

    given = TrainConfig(iterations=3)
    assert flow(given) is given
    with pytest.raises(UserError, match="a whole configuration"):
        flow(given, iterations=4)
    with pytest.raises(TypeError, match="steps"):
        flow(recipe="configs/grpo_gsm8k.yaml", steps=4)
