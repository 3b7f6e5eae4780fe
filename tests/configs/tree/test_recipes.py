"""Recipes on disk: composition, and YAML's traps.

Invariant: what a recipe says is what the tree holds. Nothing is lost to a duplicate key, a base that leads back to
itself, or a number that PyYAML takes for text.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import yaml

from penstock.base.errors import UserError
from penstock.base.home import RECIPES
from penstock.configs.loading.load import load_saved
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import compose, dump, merge, parse, read_tree


def _write(folder: Path, **recipes: str) -> None:
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_later_bases_win_and_the_recipe_wins_over_all(tmp_path: Path) -> None:
    """Key by key: recipe over the last base over the first base; `base` itself is gone."""
    _write(
        tmp_path,
        first="rollout: {prompts: 1, samples: 1, top_k: 1}\nseed: 1",
        second="rollout: {samples: 2, top_k: 2}",
        top="base: [first.yaml, second.yaml]\nrollout: {top_k: 3}",
    )
    assert read_tree(tmp_path / "top.yaml") == {"rollout": {"prompts": 1, "samples": 2, "top_k": 3}, "seed": 1}


def test_a_base_is_found_beside_its_recipe_or_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own folder comes first: moving the shell does not change what a recipe means."""
    recipes, work = tmp_path / "recipes", tmp_path / "work"
    recipes.mkdir()
    work.mkdir()
    _write(recipes, both="seed: 1", top="base: both.yaml", other="base: only.yaml")
    _write(work, both="seed: 2", only="seed: 3")
    monkeypatch.chdir(work)
    assert read_tree(recipes / "top.yaml") == {"seed": 1}
    assert read_tree(recipes / "other.yaml") == {"seed": 3}


def test_null_replaces_a_whole_section_and_a_later_section_starts_afresh(tmp_path: Path) -> None:
    """After a null nothing of the section below it shines through."""
    lower = {"kl": {"coefficient": 1, "target": 2}}
    assert merge(lower, {"kl": None}) == {"kl": None}
    assert merge(merge(lower, {"kl": None}), {"kl": {"coefficient": 3}}) == {"kl": {"coefficient": 3}}
    assert merge(lower, {"kl": {"coefficient": 3}}) == {"kl": {"coefficient": 3, "target": 2}}


@pytest.mark.parametrize("zero", [0, "0"])
def test_a_schedule_replaces_a_schedule(zero: object) -> None:
    """Steps of the schedule below must not survive between the steps of the new one; JSON turns keys into text."""
    assert merge({"lr": {0: 1.0, 100: 0.5}}, {"lr": {zero: 2.0}}) == {"lr": {zero: 2.0}}


def test_merging_leaves_its_inputs_alone() -> None:
    """Recipes shared by two bases must not bleed into each other."""
    lower = {"a": {"b": 1}}
    merge(lower, {"a": {"b": 2, "c": 3}})
    assert lower == {"a": {"b": 1}}


def test_a_circle_of_bases_is_refused_but_a_shared_base_is_not(tmp_path: Path) -> None:
    """Only a way back to itself is a circle; two bases may build on a third."""
    _write(tmp_path, a="base: b.yaml", b="base: c.yaml", c="base: a.yaml")
    with pytest.raises(UserError, match=r"a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml"):
        read_tree(tmp_path / "a.yaml")
    _write(tmp_path, ground="seed: 7", left="base: ground.yaml", right="base: ground.yaml")
    _write(tmp_path, top="base: [left.yaml, right.yaml]")
    assert read_tree(tmp_path / "top.yaml") == {"seed": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nrollout:\n  prompts: 1\n  prompts: 2\n", r"bad\.yaml, line 4: the key 'prompts' is given twice"),
        ("seed: 1\nrollout: {prompts: 1\n", r"bad\.yaml, line 3: "),
        ("- 1\n- 2\n", "a recipe is a mapping of keys to values, not a list"),
        ("base: 3\n", "'base' is 3"),
        ("base: nowhere.yaml\n", "the recipe 'nowhere.yaml' does not exist"),
        ("when: 2024-13-45\n", r"bad\.yaml: month must be"),
    ],
)
def test_a_broken_recipe_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    """The error says which file, and which line where YAML knows it."""
    _write(tmp_path, bad=text)
    with pytest.raises(UserError, match=message):
        read_tree(tmp_path / "bad.yaml")


def test_a_recipe_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    """Neither ends in a traceback."""
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe\x00")
    with pytest.raises(UserError, match="binary.yaml"):
        read_tree(tmp_path / "binary.yaml")
    with pytest.raises(UserError, match="does not exist"):
        read_tree(tmp_path / "absent.yaml")


def test_merge_keys_and_equal_keys_of_different_sections_are_no_duplicates() -> None:
    """Negative control of the duplicate check: YAML's `<<` may be overridden, and sections have their own keys."""
    text = "one: &one {a: 1, b: 2}\ntwo: {<<: *one, b: 3}\nthree: {<<: *one, a: 4}"
    tree = parse(text, "x")
    assert tree == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}, "three": {"a": 4, "b": 2}}


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("-2E3", -2000.0), (".5e1", 5.0), ("1.e+2", 100.0)])
def test_exponents_are_numbers(text: str, value: float) -> None:
    """PyYAML alone reads the first as text (the control), which no schema corrects inside `reward.settings`."""
    assert parse(text, "x") == value
    assert isinstance(parse(text, "x"), float)
    assert isinstance(yaml.safe_load("1e-6"), str)


def test_dumping_and_parsing_gives_the_tree_back() -> None:
    """Also text that looks like a number, several lines, and the smallest floats."""
    tree = {"a": "1e5", "b": 1e5, "c": "one\ntwo\n\nthree", "d": [1, None, True], "e": {0: 5e-324, 7: 0.1}, "f": "é: #"}
    assert parse(dump(tree), "x") == tree


def test_compose_without_base_changes_nothing(tmp_path: Path) -> None:
    """A tree that names no base, or an empty one, is its own result."""
    assert compose({"seed": 3, "base": None}, tmp_path) == compose({"seed": 3}, tmp_path) == {"seed": 3}


SECRET = "root:*:19000\nme:$y$j9T$of_somebody: hash:19000\n"  # the second line is no YAML after the first


def test_a_form_names_recipes_and_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by its path, nor through a link, nor through `..`, nor through a recipe that may be named."""
    outside, work = tmp_path / "outside", tmp_path / "work"
    for folder in (outside, work):
        folder.mkdir()
    (outside / "shadow").write_text(SECRET)
    _write(outside, secret=SECRET, recipe="seed: 7")
    (work / "link.yaml").symlink_to(outside / "shadow")
    (work / "notes").write_text(SECRET)
    (work / "masked.yaml").symlink_to(work / "notes")
    _write(work, through="base: ../outside/secret.yaml", listed=f"base: {outside}/recipe.yaml")
    monkeypatch.chdir(work)
    for base in (
        str(outside / "shadow"),
        "link.yaml",
        "../outside/secret.yaml",
        "through.yaml",
        "../outside/none.yaml",
    ):
        with pytest.raises(UserError, match="is not in a folder that recipes are read from"):
            TrainConfig.model_validate({"base": base})
    for base in ("notes", "masked.yaml"):
        with pytest.raises(UserError, match=r"is no \.yaml or \.yml file"):
            TrainConfig.model_validate({"base": base})
    monkeypatch.setenv("PENSTOCK_RECIPE_FOLDERS", f"{tmp_path / 'none'}:{outside}")  # the operator's
    assert TrainConfig.model_validate({"base": [str(outside / "recipe.yaml"), "listed.yaml"]}).seed == 7


def test_our_recipes_may_be_named_wherever_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a recipe of a person's own may lie anywhere, with what it builds on: the control of the refusals above."""
    monkeypatch.chdir(tmp_path)
    ours = str(RECIPES / "quickstart.yaml")
    assert TrainConfig.model_validate({"base": ours}).name == "quickstart"
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    elsewhere.mkdir()
    _write(elsewhere, mine="base: [../ground.yaml]")
    _write(tmp_path.parent, ground="seed: 5")
    assert read_tree(elsewhere / "mine.yaml") == {"seed": 5}
    (elsewhere / "config.yaml").write_text("base: ../ground.yaml\n")  # of a run folder: nobody named its base
    with pytest.raises(UserError, match="is not in a folder that recipes are read from"):
        load_saved(elsewhere / "config.yaml", TrainConfig)


def test_an_error_quotes_no_line_of_the_file(tmp_path: Path) -> None:
    """Neither in its words nor in the causes that a traceback shows. Control: YAML's own error does."""
    (tmp_path / "secret.yaml").write_text(SECRET)
    with pytest.raises(yaml.YAMLError, match="of_somebody"):
        yaml.safe_load(SECRET)
    with pytest.raises(UserError, match="line 2: mapping values are not allowed here") as caught:
        read_tree(tmp_path / "secret.yaml")
    assert "of_somebody" not in "".join(traceback.format_exception(caught.value))


def test_a_value_that_is_nested_too_deeply_is_refused_in_words() -> None:
    """Not with a RecursionError."""
    with pytest.raises(UserError, match="x: it is nested too deeply"):
        parse("[" * 100_000, "x")
