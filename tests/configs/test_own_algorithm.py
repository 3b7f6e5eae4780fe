"""An estimator or a loss named as `module:function`: what a recipe may say of it, and what is refused beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms import advantages
from algorithms.discovery import functions
from algorithms.registry import choice_named
from configs.loading.load import config_from_mapping, to_yaml
from configs.tree.recipes import parse
from penstock.base.errors import UserError

MODULE = "tests.own_algorithm:"
OWN = {"advantage": f"{MODULE}above_median", "policy_loss": f"{MODULE}bounded"}


def test_settings_are_the_functions_own_laid_over_their_defaults() -> None:
    """All that is in force is in the tree, which loads back to the same; ours beside it keep their fields."""
    config = config_from_mapping({"algorithm": {**OWN, "settings": {"scale": 2.0}}}, "a recipe")
    algorithm = config.algorithm
    assert algorithm.settings == {"scale": 2.0, "steepness": 1.0}
    assert (algorithm.functions, algorithm.needs) == (tuple(OWN.values()), {"group"})
    assert algorithm.clip_low is None
    assert config_from_mapping(parse(to_yaml(config), "the tree"), "the tree") == config
    tree = {"advantage": OWN["advantage"], "clip_low": 0.3, "mini_batches": 2}
    half = config_from_mapping({"algorithm": tree}, "a recipe").algorithm
    assert (half.settings, half.clip_low, half.clip_high) == ({"scale": 1.0}, 0.3, 0.2)
    assert config_from_mapping({}, "a recipe").algorithm.settings == {}


def test_a_module_of_ones_own_is_as_a_file_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may choose tokens, and that function's settings are its own, too. Control: without one it chooses none."""
    assert choice_named(OWN["policy_loss"]) is None

    def choose(advantages_C: Any, old_logprobs_C: Any, *, share: float = 0.5) -> Any:
        return advantages_C * 0

    monkeypatch.setattr("tests.own_algorithm.choose", choose, raising=False)
    assert choice_named(OWN["policy_loss"]) is choose
    assert config_from_mapping({"algorithm": OWN}, "a recipe").algorithm.settings["share"] == 0.5


def test_a_name_that_ours_have_too_is_another_setting() -> None:
    """Each of the two functions has its own value, from its own place."""
    tree = {"advantage": f"{MODULE}steeper", "settings": {"clip_low": 0.3}, "clip_low": 0.1, "epochs": 2}
    algorithm = config_from_mapping({"algorithm": tree}, "a recipe").algorithm
    assert algorithm.settings_for(f"{MODULE}steeper", ["clip_low", "steepness"]) == {"clip_low": 0.3, "steepness": 2.0}
    assert algorithm.settings_for("ppo_clip", ["clip_low", "clip_high"]) == {"clip_low": 0.1, "clip_high": 0.2}


def test_one_setting_of_two_functions_has_one_default_or_a_value() -> None:
    """Neither default wins without a word. Control: with a value both have it."""
    both = {"advantage": f"{MODULE}steeper", "policy_loss": OWN["policy_loss"]}
    with pytest.raises(UserError, match="lacks 'steepness'.* two of them not the same"):
        config_from_mapping({"algorithm": both}, "a recipe")
    algorithm = config_from_mapping({"algorithm": both | {"settings": {"steepness": 3.0}}}, "a recipe").algorithm
    assert all(algorithm.settings_for(name, ["steepness"]) == {"steepness": 3.0} for name in both.values())


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"policy_loss": f"{MODULE}namesake", "clip_low": 0.1}, "'clip_low' is a setting of your own function here"),
        ({**OWN, "settings": {"scal": 1}}, r"has 'scal', which your function does not take \(did you mean 'scale'"),
        ({"settings": {"scale": 1}}, "neither 'advantage' nor 'policy_loss' is yours"),
        ({"advantage": f"{MODULE}without_default"}, "lacks 'margin', for which your function has no default"),
        ({"advantage": f"{MODULE}odd_default"}, "the default of 'edges' is a tuple"),
        ({"advantage": f"{MODULE}two_inputs"}, "one argument before a '\\*'"),
        ({"advantage": f"{MODULE}abov_median"}, "did you mean 'above_median'"),
        ({"policy_loss": "nowhere:loss"}, "module 'nowhere' does not import"),
        ({**OWN, "clip_low": 0.1}, "'clip_low' has no effect with advantage"),
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
