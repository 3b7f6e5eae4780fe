"""Every configuration key has a test that shows what it does, or that it is refused, named in tests/configs/effects.py.

The tables are checked against the trees and against the tests' sources, so a key cannot come without a test, a test
that is renamed is missed, and so is one that does not use the key. Left out: whether the test is a good one.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest
from pydantic import BaseModel

from penstock.configs.loading.keys import describe_keys
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.section import Recipe
from tests.configs.effects import EFFECTS, SHARED_WITH_TRAIN
from tests.configs.sources import words_of


def leaf_keys(tree: type[BaseModel]) -> set[str]:
    """Return every key of a tree that holds a value; sections are not among them.

    Nor are the settings of algorithms, which no tree names: they come from the functions, and so does the test of
    `algorithm.settings`, which takes every setting of every function.
    """
    keys = {key.name for key in describe_keys(tree) if "section" not in key.type}
    return {key for key in keys if key.rpartition(".")[0] not in keys}


def problems(keys: set[str], table: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a table of keys and tests, a sentence each."""
    found = [f"{key}: no test" for key in sorted(keys) if not any(fnmatchcase(key, pattern) for pattern in table)]
    for pattern, test in table.items():
        matching = [key for key in keys if fnmatchcase(key, pattern)]
        try:
            words = words_of(f"tests/{test}")
        except LookupError as error:
            found.append(f"{pattern}: {error}")
            continue
        names = {key.rpartition(".")[2] for key in matching}
        found += [f"{pattern}: {test} does not use '{name}'" for name in sorted(names - words)]
        if not matching:
            found.append(f"{pattern}: no such key")
    return found


def test_every_key_of_a_training_has_its_test() -> None:
    assert problems(leaf_keys(TrainConfig), EFFECTS["train"]) == []


@pytest.mark.parametrize(("name", "tree"), [("preference", PreferenceConfig), ("reward-model", RewardModelConfig)])
def test_every_key_of_the_other_recipes_has_its_test(name: str, tree: type[BaseModel]) -> None:
    """But for sections that are a training's own, read by the same code."""
    own = {key for key in leaf_keys(tree) if not key.startswith(SHARED_WITH_TRAIN)}
    assert problems(own, EFFECTS[name]) == []


@pytest.mark.slow
def test_a_key_without_a_test_and_a_line_without_a_key_are_noticed() -> None:
    """The control: an invented key, an invented line, a test that is not there, one that does not use the key."""

    class Invented(TrainConfig):
        surprise: int = 0

    assert leaf_keys(Invented) - leaf_keys(TrainConfig) == {"surprise"}
    table = EFFECTS["train"]
    assert problems(leaf_keys(Invented), table) == ["surprise: no test"]
    keys, seed = leaf_keys(TrainConfig), table["seed"]
    assert problems(keys, {**table, "sead": seed}) == ["sead: no such key"]
    (problem,) = problems(keys, {**table, "seed": seed + "_x"})
    assert "has no test" in problem
    another = "data/test_tokenizer.py::test_nothing_is_added_to_a_text"
    (problem,) = problems(keys, {**table, "seed": another})
    assert "does not use 'seed'" in problem


def test_a_tree_of_sections_has_the_keys_at_its_ends() -> None:
    """Sections, also those that may be null or that have the user's names, are walked and are no keys themselves."""
    keys = leaf_keys(TrainConfig)
    assert {"base", "sft.steps", "algorithm.kl.coefficient", "groups.<name>.roles", "reward.settings"} <= keys
    assert "algorithm.settings" in keys
    assert "algorithm.settings.clip_low" not in keys
    assert not {"sft", "algorithm", "algorithm.kl", "groups"} & keys
    assert leaf_keys(Recipe) == {"base"}
