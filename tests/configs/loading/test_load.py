"""Loading: overrides, one clear error for many mistakes, and the way back to YAML.

Invariant: a configuration written down and read again is the same one, whichever way it came (recipe, override, JSON of
a flow parameter); and whatever is wrong is named by its dotted key, with what was probably meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping, describe_keys, load_config, to_yaml
from penstock.configs.schema import TrainConfig
from penstock.configs.tree import recipes


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "seed: 5\nalgorithm:\n  kl: {coefficient: 0.01}\ngroups:\n  main: {roles: [actor, rollout, reference]}\n"
    )
    return path


def test_overrides_are_yaml_and_reach_every_depth(recipe: Path) -> None:
    """Numbers, schedules, text and sections that the recipe does not have (`sft` is null)."""
    config = load_config(
        recipe,
        [
            "actor.optimizer.learning_rate=1e-6",
            "actor.micro_batch_tokens={0: 100, 10: 400}",
            "model.path=a/b=c",
            "sft.optimizer.learning_rate=3",
            "reward.function=m:f",
            "reward.settings.tolerance=1e-6",
            "groups.main.ranks=2",
        ],
    )
    assert config.actor.optimizer.learning_rate == 1e-6
    assert config.actor.micro_batch_tokens == {0: 100, 10: 400}
    assert config.model.path == "a/b=c"
    assert config.sft is not None and config.sft.optimizer.learning_rate == 3.0
    assert config.reward.settings == {"tolerance": 1e-6}
    assert config.groups["main"].ranks == 2
    assert config.algorithm.kl is not None and config.algorithm.kl.coefficient == 0.01, "the recipe's own values stay"


def test_null_removes_a_section(recipe: Path) -> None:
    """For a section that may be absent it is absence; for any other key the default is in force again."""
    assert load_config(recipe, ["algorithm.kl=null", "groups=null"]).algorithm.kl is None
    assert load_config(recipe, ["groups=null"]).groups == {}
    assert load_config(recipe, ["groups.main=null"]).groups == {}
    assert load_config(recipe, ["seed=null", "rollout=null"]).seed == TrainConfig().seed != load_config(recipe).seed


def test_null_is_a_value_where_the_key_may_be_null() -> None:
    """The control of the rule above: null must not fall back to the default 0.2."""
    values: dict[str, Any] = {"algorithm": {"name": "ppo"}, "critic": {"value_clip": None}}
    critic = config_from_mapping(values, "x").critic
    assert critic is not None and critic.value_clip is None


def test_later_overrides_win(recipe: Path) -> None:
    """In the order they are written, also below a section removed before."""
    assert load_config(recipe, ["seed=1", "seed=2"]).seed == 2
    kl = load_config(recipe, ["algorithm.kl=null", "algorithm.kl.place=reward"]).algorithm.kl
    assert kl is not None and kl.coefficient == 0.001


@pytest.mark.parametrize("override", ["seed", "=3", "seed=", "rollout..prompts=3", ".seed=3", "seed= "])
def test_a_malformed_override_is_refused(recipe: Path, override: str) -> None:
    """It shows the form that is expected."""
    with pytest.raises(UserError, match=r"is not section\.key=value"):
        load_config(recipe, [override])


def test_an_override_that_is_not_yaml_is_refused(recipe: Path) -> None:
    """It says that quotes help."""
    with pytest.raises(UserError, match="goes in quotes"):
        load_config(recipe, ["data.template={prompt} please"])
    assert load_config(recipe, ["data.template='{prompt} please'"]).data.template == "{prompt} please"


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("actor.optimizer.learning_rat", "did you mean 'actor.optimizer.learning_rate'?"),
        ("actor.learning_rate", "'learning_rate' exists at actor.optimizer.learning_rate"),
        ("actor.lr", "'learning_rate' exists at actor.optimizer.learning_rate"),
        (
            "actor.temperature",
            "'temperature' exists at reward.judge.temperature, rollout.temperature, evaluate.temperature",
        ),
        ("groups.main.role", "did you mean 'groups.main.roles'?"),
    ],
)
def test_an_unknown_key_says_what_was_meant(recipe: Path, name: str, guess: str) -> None:
    """The same guess for an override and for a key in a file: beside it first, then deeper, then anywhere."""
    with pytest.raises(UserError) as by_override:
        load_config(recipe, [f"{name}=1"])
    tree: Any = 1
    for part in reversed(name.split(".")):
        tree = {part: tree}
    with pytest.raises(UserError) as by_file:
        config_from_mapping(tree, "x.yaml")
    assert guess in str(by_override.value)
    assert f"{name}: unknown key; {guess}" in str(by_file.value)
    assert by_file.value.remedy == by_override.value.remedy == "penstock keys lists every valid key"


def test_an_unknown_name_says_which_are_there(recipe: Path) -> None:
    """In order, the nearest as a guess. Controls: a name that is near none, and numbers."""
    with pytest.raises(UserError) as near:
        load_config(recipe, ["algorithm.name=grop"])
    assert "algorithm.name: must be 'best_of_n', 'cispo', 'clip_cov', " in near.value.problem
    assert "'rloo' or 'sapo' (given: 'grop'; did you mean 'grpo'?)" in near.value.problem
    with pytest.raises(UserError, match=r"'rloo' or 'sapo' \(given: 'xyzzy'\)"):
        load_config(recipe, ["algorithm.name=xyzzy"])
    with pytest.raises(UserError, match=r"must be 0, 1, 2 or 3 \(given: 7\)"):
        load_config(recipe, ["actor.zero_stage=7"])


@pytest.mark.parametrize("given", ["five", '"1"'])
def test_text_where_one_of_some_numbers_belongs_is_refused(recipe: Path, given: str) -> None:
    """The numbers have no names, so there is no nearest one. Control: the number itself."""
    with pytest.raises(UserError) as error:
        load_config(recipe, [f"actor.zero_stage={given}"])
    assert "actor.zero_stage: must be 0, 1, 2 or 3 (given: '" in error.value.problem
    assert load_config(recipe, ["actor.zero_stage=1"]).actor.zero_stage == 1


def test_initials_are_a_guess_for_a_key_and_not_for_a_value(recipe: Path) -> None:
    """Several names of algorithms begin with one letter: which is meant nobody can say."""
    with pytest.raises(UserError, match=r"\(given: 'r'\)"):
        load_config(recipe, ["algorithm.name=r"])
    with pytest.raises(UserError, match="'learning_rate' exists at"):
        load_config(recipe, ["actor.lr=1"])


def test_no_guess_where_nothing_is_near(recipe: Path) -> None:
    """A wrong guess is worse than none."""
    with pytest.raises(UserError) as error:
        load_config(recipe, ["xyzzy=1"])
    assert error.value.problem == "the override 'xyzzy=1' names no key"


def test_every_mistake_is_listed_once_by_its_key() -> None:
    """One error for all of them; the branches of a schedule's type do not show."""
    values = {
        "iterations": 0,
        "actor": {"optimizer": {"learning_rate": "fast", "betas": [0.9]}, "zero_stage": 7},
        "rollout": 3,
        "algorithm": {"settings": {"clip_low": {1: 0.2}}, "kl": {"horizon": 3}},
        "groups": {"main": {"gpus": ["x"]}},
    }
    with pytest.raises(UserError) as error:
        config_from_mapping(values, "x.yaml")
    first, *lines = error.value.problem.splitlines()
    assert first == "x.yaml: 9 settings are wrong"
    keys = [line.strip().partition(": ")[0] for line in lines]
    assert sorted(keys) == sorted(
        [
            "iterations",
            "actor.optimizer.learning_rate",
            "actor.optimizer.betas.1",
            "actor.zero_stage",
            "rollout",
            "algorithm.settings.clip_low",
            "algorithm.kl",
            "groups.main.gpus.0",
            "groups.main.roles",
        ]
    )
    fast = "    actor.optimizer.learning_rate: must be a number (given: 'fast')"
    assert fast in lines, "the whole line: the dictionary branch of a schedule says nothing about a text"
    assert "rollout: must be a mapping of keys (given: 3)" in str(error.value)
    assert "Value error" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("iterations=three", "iterations: must be a whole number (given: 'three')"),
        ("iterations=2.5", "iterations: must be a whole number (given: 2.5)"),
        ("rollout.temperature=hot", "rollout.temperature: must be a number (given: 'hot')"),
        ("actor.gradient_checkpointing=maybe", "actor.gradient_checkpointing: must be true or false (given: 'maybe')"),
        ("name=3", "name: must be text (given: 3)"),
        ("groups.main.roles=3", "groups.main.roles: must be a list (given: 3)"),
        ("actor.optimizer.betas=3", "actor.optimizer.betas: must be a list (given: 3)"),
    ],
)
def test_a_wrong_type_is_said_in_words(override: str, words: str) -> None:
    """Without pydantic's: no parsing, no interpreting, no validity."""
    with pytest.raises(UserError, match="one setting is wrong") as error:
        load_config(Path("configs/quickstart.yaml"), [override])
    assert str(error.value).splitlines()[1].strip() == words


PPO = {
    "name": "1e5",
    "algorithm": {"name": "ppo", "mini_batches": 4, "kl": {"target": 0.1}},
    "actor": {"optimizer": {"learning_rate": {0: 1e-6, 100: 5e-7}}},
    "data": {"template": "Question:\n{prompt}\n\nAnswer: "},
    "reward": {"function": "m:f", "settings": {"small": 1e-7, "text": "1e-7"}},
}


@pytest.mark.parametrize("values", [{}, PPO])
def test_a_resolved_config_loads_back_to_itself(values: dict[str, Any]) -> None:
    """YAML and JSON give the same configuration back, filled defaults included."""
    config = config_from_mapping(values, "x")
    text = to_yaml(config)
    assert config_from_mapping(recipes.parse(text, "x"), "x") == config
    assert to_yaml(config_from_mapping(recipes.parse(text, "x"), "x")) == text
    assert config_from_mapping(json.loads(config.model_dump_json()), "x") == config
    assert list(recipes.parse(text, "x")) == [name for name in TrainConfig.model_fields if name != "base"]


def test_different_configs_have_different_yaml() -> None:
    """The control of the round trip: equality is not vacuous."""
    assert to_yaml(config_from_mapping(PPO, "x")) != to_yaml(config_from_mapping({**PPO, "seed": 1}, "x"))


def test_parameters_lie_over_the_recipes_they_name(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow's parameters, through JSON: what they give wins, what they leave at its default does not."""
    monkeypatch.chdir(recipe.parent)
    parameters = {
        "base": str(recipe),
        "iterations": 5,
        "actor": {"optimizer": {"learning_rate": {"0": "1e-6", "10": "1e-7"}}},
        "algorithm": {"kl": {"place": "reward"}},
    }
    config = TrainConfig.model_validate_json(json.dumps(parameters))
    assert config.base is None
    assert (config.seed, config.iterations) == (5, 5)
    assert config.actor.optimizer.learning_rate == {0: 1e-6, 10: 1e-7}
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.coefficient, config.algorithm.kl.place) == (0.01, "reward")


@pytest.mark.parametrize("base", [True, False])
def test_null_in_a_parameter_means_what_it_means_in_a_recipe(
    recipe: Path, base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the recipe gave is taken back, with a recipe or without. Control: null stays where it is a value."""
    monkeypatch.chdir(recipe.parent)
    given = {"groups": None, "seed": None, "rollout": {"samples": None}, "algorithm": {"kl": None}}
    config = TrainConfig.model_validate(given | ({"base": str(recipe)} if base else {}))
    assert (config.groups, config.seed, config.rollout.samples) == ({}, TrainConfig().seed, 8)
    assert config.algorithm.kl is None


def test_the_list_of_keys_is_complete_and_each_can_be_overridden(recipe: Path) -> None:
    """Every key has a description and a type; every default, written as an override, is accepted as that default."""
    keys = {key.name: key for key in describe_keys()}
    assert all(key.description and key.type for key in keys.values())
    assert {"iterations", "actor.optimizer.learning_rate", "groups.<name>.gpus", "reward.settings"} <= keys.keys()
    assert keys["rollout.top_p"] == (
        "rollout.top_p",
        "number > 0 and <= 1",
        "1.0",
        "nucleus sampling: keep this probability mass",
    )
    assert keys["actor.micro_batch_tokens"].type == "integer or {iteration: integer} or null"
    assert keys["groups.<name>.roles"].default == ""

    flat = _flatten(TrainConfig().model_dump(mode="json"))
    assert {name: json.loads(keys[name].default) for name in flat if not _filled(name)} == {
        name: value for name, value in flat.items() if not _filled(name)
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in flat.items()]
    empty = recipe.with_name("empty.yaml")
    empty.write_text("")
    assert load_config(empty, overrides) == TrainConfig()


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def _filled(name: str) -> bool:
    names = ("advantage", "policy_loss", "aggregation", "settings")
    # null, and an empty mapping, stand for what the default algorithm, and the default optimizer, has
    of_optimizer = name.endswith((".optimizer.betas", ".optimizer.eps"))
    return (
        of_optimizer
        or name.startswith("algorithm.settings.")
        or name in {f"algorithm.{key}" for key in names} | {"evaluate.evaluators"}
    )
