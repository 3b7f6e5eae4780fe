"""What a form gives is the configuration that the command line would make of it, or a refusal in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.idle import idle_settings
from penstock.configs.loading.form import config_from_form
from penstock.configs.loading.load import load_config, to_yaml
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig

QUICKSTART = "configs/quickstart.yaml"
FIELDS = {
    "name": "mine",
    "model.path": None,
    "data.train": None,
    "iterations": 7,
    "actor.optimizer.learning_rate": 1e-5,
    "rollout.prompts": 64,
    "rollout.samples": 4,
    "seed": 3,
}


def asked(
    fields: dict[str, Any] | None = None,
    overrides: Sequence[str] = (),
    advanced: TrainConfig | dict[str, Any] | None = None,
    recipe: str | None = QUICKSTART,
    resume: str | None = None,
) -> TrainConfig:
    """Return what the form of a training gives."""
    return config_from_form(TrainConfig, recipe, fields or {}, overrides, advanced, resume)


def test_a_form_is_the_command_line_to_the_last_key_of_config_yaml() -> None:
    """Fields, overrides and the advanced section at once. Control: the recipe alone is another file."""
    form = asked(FIELDS, ["algorithm.name=ppo", "sft=null"], {"rollout": {"temperature": {"0": 1.0, "5": 0.5}}})
    said = [f"{key}={value}" for key, value in FIELDS.items() if value is not None]
    line = load_config(
        Path(QUICKSTART), [*said, "algorithm.name=ppo", "sft=null", "rollout.temperature={0: 1.0, 5: 0.5}"]
    )
    assert to_yaml(form) == to_yaml(line)
    assert form == line
    assert idle_settings(form) == idle_settings(line)
    assert to_yaml(asked()) == to_yaml(load_config(Path(QUICKSTART))) != to_yaml(form)


def test_text_of_a_field_is_text() -> None:
    """A folder called 007 is no number. Control: of an override, which is YAML, it is one, and refused."""
    assert asked({"name": "007"}).name == "007"
    with pytest.raises(UserError, match="name: must be text"):
        asked(overrides=["name=007"])


def test_an_empty_section_says_nothing() -> None:
    """A page leaves them behind; they would switch on what the recipe leaves off. Control: an override does."""
    recipe = "configs/grpo_gsm8k.yaml"
    assert asked(advanced={"sft": {"optimizer": {}}, "rollout": {}}, recipe=recipe).sft is None
    assert asked(overrides=["sft={}"], recipe=recipe).sft is not None


@pytest.mark.parametrize(
    ("fields", "overrides", "advanced", "key"),
    [
        ({"iterations": 7}, [], {"iterations": 8}, "'iterations' is given twice: 7 by the field, 8 by the advanced"),
        ({"rollout.samples": 4}, ["rollout.samples=8"], {}, "'rollout.samples' is given twice: 4 by the field, 8 by o"),
        ({"rollout.samples": 4}, ["rollout={samples: 8}"], {}, "'rollout.samples' is given twice"),
        ({}, ["sft=null"], {"sft": {"steps": 3}}, "'sft' is given twice"),
        ({}, ["rollout.temperature={0: 1, 5: 2}"], {"rollout": {"temperature": {"0": 1.0}}}, "'rollout.temperature'"),
    ],
)
def test_two_values_of_a_key_are_refused(
    fields: dict[str, Any], overrides: list[str], advanced: dict[str, Any], key: str
) -> None:
    """Whatever their order would be. Controls: each of them alone."""
    with pytest.raises(UserError, match=key):
        asked(fields, overrides, advanced)
    asked(fields)
    asked(overrides=overrides)
    asked(advanced=advanced)


def test_the_same_value_twice_and_neighbours_are_no_contradiction() -> None:
    """Of two overrides the later wins, as on the command line."""
    given = asked({"rollout.samples": 4}, ["rollout.samples=4", "seed=1", "seed=2"], {"rollout": {"prompts": 64}})
    assert (given.rollout.samples, given.rollout.prompts, given.seed) == (4, 64, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overrides": ["rollout.sampels=4"]}, "the override 'rollout.sampels=4' names no key; did you mean"),
        ({"overrides": ["nonsense"]}, "the override 'nonsense' is not section.key=value"),
        (
            {"advanced": {"algorithm": {"name": "grop"}}},
            f"{QUICKSTART}: one setting is wrong\n    algorithm.name: must",
        ),
        ({"advanced": {"base": QUICKSTART}}, "the advanced section has 'base'"),
        ({"recipe": "nowhere.yaml"}, "the form: the recipe 'nowhere.yaml' does not exist in"),
        ({"recipe": "/etc/passwd"}, "the form: the recipe '/etc/passwd' is not in a folder that recipes are read from"),
        ({"advanced": TrainConfig()}, "a whole configuration leaves nothing to a recipe"),
    ],
)
def test_mistakes_are_told_in_the_words_of_the_command_line(given: dict[str, Any], words: str) -> None:
    """Control: the same form without them, above."""
    with pytest.raises(UserError, match=words):
        asked(**given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"fields": FIELDS}, "'name', given by the field, is for a new run, and runs/old goes on"),
        ({"overrides": ["rollout.samples=4"]}, "'rollout.samples', given by overrides,"),
        ({"advanced": {"rollout": {"samples": 4}}}, "'rollout.samples', given by the advanced section,"),
        ({"advanced": TrainConfig()}, "a configuration is for a new run"),
    ],
)
def test_a_run_that_goes_on_takes_no_settings_of_a_new_one(given: dict[str, Any], named: str) -> None:
    """Controls: without them, and the recipe, which a deployment always gives, is no setting."""
    with pytest.raises(UserError, match=named):
        asked(**given, resume="runs/old")
    assert asked({"seed": None}, [], {}, resume="runs/old") == TrainConfig()


def test_a_whole_configuration_is_taken_as_it_is() -> None:
    """That of the command line, alone."""
    config = load_config(Path(QUICKSTART))
    assert asked(advanced=config, recipe=None) is config


def test_other_trees_are_asked_for_alike() -> None:
    """Of preferences. Control: a key of a training is none of theirs."""
    fields = {"trainer.steps": 3, "trainer.optimizer.learning_rate": 1e-5}
    given = config_from_form(PreferenceConfig, "configs/dpo.yaml", fields, ["loss.name=ipo"], None)
    assert (given.trainer.steps, given.loss.name) == (3, "ipo")
    with pytest.raises(UserError, match="names no key"):
        config_from_form(PreferenceConfig, "configs/dpo.yaml", {}, ["rollout.samples=4"], None)
