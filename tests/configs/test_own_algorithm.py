"""An estimator or a loss named as `module:function`: what a recipe may say of it, and what is refused beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.algorithms import advantages
from penstock.algorithms.declarations.discovery import functions
from penstock.algorithms.declarations.settings import arguments
from penstock.algorithms.registry import advantage_named, choice_named, policy_loss_named
from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping, to_yaml
from penstock.configs.tree.recipes import parse

MODULE = "tests.own_algorithm:"
OWN = {"advantage": f"{MODULE}above_median", "policy_loss": f"{MODULE}bounded"}


def test_settings_are_the_functions_own_laid_over_their_defaults() -> None:
    """All that is in force is in the tree, which loads back to the same; those of ours are beside them."""
    config = config_from_mapping({"algorithm": {**OWN, "settings": {"scale": 2.0}}}, "a recipe")
    algorithm = config.algorithm
    assert algorithm.settings == {"scale": 2.0, "steepness": 1.0}
    assert (algorithm.functions, algorithm.needs) == (tuple(OWN.values()), {"group"})
    assert config_from_mapping(parse(to_yaml(config), "the tree"), "the tree") == config
    tree = {"advantage": OWN["advantage"], "settings": {"clip_low": 0.3}, "mini_batches": 2}
    half = config_from_mapping({"algorithm": tree}, "a recipe").algorithm
    assert half.settings == {"scale": 1.0, "clip_low": 0.3, "clip_high": 0.2, "dual_clip": None}


def test_a_module_of_ones_own_is_as_a_file_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may choose tokens, and that function's settings are its own, too. Control: without one it chooses none."""
    assert choice_named(OWN["policy_loss"]) is None

    def choose(advantages_C: Any, old_logprobs_C: Any, *, share: float = 0.5) -> Any:
        return advantages_C * 0

    monkeypatch.setattr("tests.own_algorithm.choose", choose, raising=False)
    assert choice_named(OWN["policy_loss"]) is choose
    assert config_from_mapping({"algorithm": OWN}, "a recipe").algorithm.settings["share"] == 0.5


def test_a_name_that_ours_have_too_is_one_setting_or_refused() -> None:
    """A `clip_low` of another type would be a value of two meanings. Control: annotated as ours it is one of both."""
    tree = {"advantage": f"{MODULE}steeper", "settings": {"clip_low": 0.3}, "epochs": 2}
    with pytest.raises(UserError, match=r"'clip_low' is a setting of advantage '.*steeper' \(float\) and of policy"):
        config_from_mapping({"algorithm": tree}, "a recipe")
    tree["advantage"] = f"{MODULE}alike"
    algorithm = config_from_mapping({"algorithm": tree}, "a recipe").algorithm
    for function in (advantage_named(tree["advantage"]), policy_loss_named("ppo_clip")):
        assert arguments(function, algorithm.settings)["clip_low"] == 0.3
    config_from_mapping({"algorithm": tree | {"epochs": 1}}, "a recipe")  # of the estimator it has an effect


def test_one_setting_of_two_functions_has_one_default_or_a_value() -> None:
    """Neither default wins without a word. Control: with a value both have it."""
    both = {"advantage": f"{MODULE}steeper", "policy_loss": OWN["policy_loss"]}
    with pytest.raises(UserError, match="settings.steepness: is required: .* two functions have different ones"):
        config_from_mapping({"algorithm": both}, "a recipe")
    algorithm = config_from_mapping({"algorithm": both | {"settings": {"steepness": 3.0}}}, "a recipe").algorithm
    for function in (advantage_named(both["advantage"]), policy_loss_named(both["policy_loss"])):
        assert arguments(function, algorithm.settings)["steepness"] == 3.0


def test_settings_of_ones_own_are_checked_by_their_annotations() -> None:
    """Types and bounds. Control: a setting without an annotation takes anything that a recipe can hold."""
    own = {"advantage": f"{MODULE}annotated", "policy_loss": OWN["policy_loss"]}
    wrong = {"least": -1, "kind": "sideways", "anything": {"a": [1]}, "steepness": "much"}
    with pytest.raises(UserError, match="3 settings are wrong") as caught:
        config_from_mapping({"algorithm": {**own, "settings": wrong}}, "a recipe")
    for words in ("least: must be greater than 0", "kind: must be 'down' or 'up'", "steepness: must be a number"):
        assert f"algorithm.settings.{words}" in caught.value.problem
    given = {"least": {0: 1, 5: 2}, "anything": {"a": [1]}}
    algorithm = config_from_mapping({"algorithm": {**own, "settings": given}}, "a recipe").algorithm
    assert algorithm.settings == {"least": {0: 1.0, 5: 2.0}, "kind": "up", "anything": {"a": [1]}, "steepness": 1.0}
    assert algorithm.scheduled == {"least", "steepness"}


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"policy_loss": f"{MODULE}namesake", "clip_low": 0.1}, "'clip_low' exists at algorithm.settings.clip_low"),
        ({**OWN, "settings": {"scal": 1}}, r"settings.scal: unknown setting \(did you mean 'scale'"),
        (
            {"settings": {"scale": 1}},
            "settings.scale: unknown setting; settings of advantage 'grpo' and policy loss",
        ),
        ({"advantage": f"{MODULE}without_default"}, "settings.margin: is required: your function has no default"),
        ({"advantage": f"{MODULE}odd_default"}, "settings.edges: is a tuple, which a recipe cannot hold"),
        ({"advantage": f"{MODULE}two_inputs"}, "one argument before a '\\*'"),
        ({"advantage": f"{MODULE}abov_median"}, "did you mean 'above_median'"),
        ({"policy_loss": "nowhere:loss"}, "module 'nowhere' does not import"),
        ({**OWN, "settings": {"clip_low": 0.1}}, "settings.clip_low: has no effect with advantage"),
        ({"advantage": "grppo"}, "did you mean 'grpo'.* or a function of yours, 'module:function'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(algorithm: dict[str, Any], words: str) -> None:
    """In words: the control is the first test, with the same functions."""
    with pytest.raises(UserError, match=words):
        config_from_mapping({"algorithm": algorithm}, "a recipe")


def test_what_it_needs_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups to compare, a critic; an invented need is answered with those there are."""
    with pytest.raises(UserError, match="at least 2"):
        config_from_mapping({"algorithm": OWN, "rollout": {"samples": 1}}, "a recipe")
    monkeypatch.setattr("tests.own_algorithm.NEEDS", ("critic",))
    assert "critic" in config_from_mapping({"algorithm": OWN}, "a recipe").roles
    monkeypatch.setattr("tests.own_algorithm.NEEDS", ("oracle",))
    with pytest.raises(UserError, match="'oracle'") as caught:
        config_from_mapping({"algorithm": OWN}, "a recipe")
    assert "old_logprobs" in caught.value.remedy


def test_a_stray_file_in_the_package_is_named() -> None:
    """Not answered with an AttributeError. Control: every file that is there holds its function."""
    assert functions(advantages.MODULES) == advantages.ADVANTAGES
    with pytest.raises(UserError, match="holds no function 'notes'"):
        functions({**advantages.MODULES, "notes": advantages.MODULES["grpo"]})
