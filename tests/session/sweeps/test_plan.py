"""A sweep planned: names, what is kept of it, and that every combination is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.base.errors import UserError
from penstock.session.sweeps.plan import Asked, begin, begin_sweep, named, planned, taken_up
from penstock.state.run_folder import RunFolder
from penstock.state.sweep import SweepFolder, is_sweep, read_sweep, sweep_of
from tests.own_code.model import write_own_model

RECIPE = """
name: sums
iterations: 2
model: {tiny: {hidden_size: 96, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 96, max_positions: 64}}
data: {arithmetic: {digits: 2, train: 32, heldout: 8}, max_prompt_tokens: 8}
reward: {function: "penstock.rewards.builtin:exact_match", settings: {suffix: "."}}
rollout: {prompts: 4, samples: 2, max_response_tokens: 6}
"""
SETTINGS = ("actor.optimizer.learning_rate=1e-3,3e-3", "seed=0,1")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A recipe in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("sums.yaml").write_text(RECIPE, encoding="utf-8")
    yield "sums.yaml"


def test_a_sweep_is_planned_begun_and_taken_up_as_it_was(recipe: str, tmp_path: Path) -> None:
    """Its folder has all of it: a changed recipe does not change what is left."""
    plan = planned(recipe, Asked(SETTINGS), anywhere=True)
    names = [training.name for training in plan.sweep.trainings]
    assert names == [
        f"{n}-learning_rate-{rate}-seed-{s}"
        for n, (rate, s) in enumerate(((r, s) for r in ("1e-3", "3e-3") for s in (0, 1)), 1)
    ]
    assert [(plan.configs[name].seed, plan.configs[name].name) for name in names] == [
        (n % 2, names[n]) for n in range(4)
    ]
    assert not Path("runs").exists(), "nothing is written before the sweep begins"
    folder = begin(plan)
    assert folder.path.parent == tmp_path / "runs" and folder.path.name.startswith("sums-sweep-")
    (tmp_path / recipe).write_text(RECIPE.replace("iterations: 2", "iterations: 3"), encoding="utf-8")
    again = taken_up(folder, at_once=2)
    assert (again.sweep.trainings, again.sweep.at_once, len(again.lanes)) == (plan.sweep.trainings, 2, 2)
    assert again.configs == plan.configs
    assert [item.name for item in folder.left(again.sweep)] == names


def test_a_run_knows_the_sweep_that_it_is_of(recipe: str) -> None:
    """By the folder that it lies in. Control: a run beside the sweep."""
    folder = begin(planned(recipe, Asked(SETTINGS), anywhere=True))
    found = sweep_of(RunFolder(folder.path / "1-x"))
    assert found is not None and found.settings == SETTINGS
    assert is_sweep(folder.path) and not is_sweep(folder.path.parent)
    assert sweep_of(RunFolder(folder.path.parent / "other")) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("rollout.samples=2,0",), "rollout.samples=0: the recipe with it: one setting is wrong"),
        (("rollout.prompts=4,6", "algorithm={mini_batches: 4, mini_batch_of: prompts}"), "rollout.prompts=6: "),
        (
            (
                "reward.settings.suffix='.'",
                "reward.function=penstock.rewards.builtin:exact_match,penstock.rewards.builtin:f",
            ),
            "has no 'f'",
        ),
        (("rollout.max_response_tokens=6,600", "seed=0,1"), "rollout.max_response_tokens=600 seed=0: "),
    ],
)
def test_a_combination_that_cannot_work_is_named_before_the_first_begins(
    recipe: str, settings: tuple[str, ...], problem: str
) -> None:
    """By its own settings. Control: the plan above."""
    with pytest.raises(UserError) as caught:
        planned(recipe, Asked(settings), anywhere=True)
    assert problem in str(caught.value)
    assert not Path("runs").exists()


def test_a_form_names_recipes_that_lie_ready_alone(recipe: str, tmp_path: Path) -> None:
    """As for `base`. Controls: one in the working folder; and a person at a terminal, who may name any."""
    assert begin_sweep(recipe, Asked(SETTINGS), None).sweep.is_file()
    outside = tmp_path.parent / "outside.yaml"
    outside.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(UserError, match="not in a folder that recipes are read from"):
        begin_sweep(str(outside), Asked(SETTINGS), None)
    assert planned(str(outside), Asked(SETTINGS), anywhere=True).configs
    with pytest.raises(UserError, match="no recipe given"):
        begin_sweep(None, Asked(SETTINGS), None)
    with pytest.raises(UserError, match="goes on as it was asked for"):
        begin_sweep(recipe, Asked(SETTINGS), "runs")


def test_a_figure_that_is_none_is_refused(recipe: str) -> None:
    """Control: the lowest of one."""
    with pytest.raises(UserError, match="--by 'highest lowest x' is no figure"):
        planned(recipe, Asked(SETTINGS, by="highest lowest x"), anywhere=True)
    assert planned(recipe, Asked(SETTINGS, by="lowest heldout/kl"), anywhere=True).sweep.by == "lowest heldout/kl"


def test_a_folder_without_a_sweep_or_with_a_changed_one_is_refused(recipe: str, tmp_path: Path) -> None:
    """It says what is wrong. Control: the file as it was."""
    with pytest.raises(UserError, match="holds no sweep"):
        read_sweep(SweepFolder(tmp_path))
    folder = begin(planned(recipe, Asked(SETTINGS), anywhere=True))
    tree = yaml.safe_load(folder.sweep.read_text(encoding="utf-8"))
    folder.sweep.write_text(yaml.safe_dump(tree | {"extra": 1}), encoding="utf-8")
    with pytest.raises(UserError, match=r"sweep\.yaml: extra"):
        read_sweep(folder)
    folder.sweep.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert read_sweep(folder).settings == SETTINGS


def test_long_names_stay_names_of_folders() -> None:
    """With the number in front, so that none is another's. Control: short ones are whole."""
    combinations = [(f"reward.settings.text={'x/y ' * 80}{n}",) for n in range(12)]
    names = list(named(combinations, ["reward.settings.text"]))
    assert len(set(names)) == 12 and all(len(name) <= 100 and "/" not in name and " " not in name for name in names)
    assert names[0].startswith("01-text-x-y-x-y")
    assert list(named([("seed=0",), ("seed=1",)], ["seed"])) == ["1-seed-0", "2-seed-1"]


def test_a_sweep_of_a_model_with_code_of_its_own(recipe: str, tmp_path: Path) -> None:
    """Each of its trainings notes that code as it begins. Control: without the key the sweep is refused."""
    write_own_model(tmp_path / "own")
    model = f"{{path: {tmp_path / 'own'}, trust_remote_code: true}}"
    tree = yaml.safe_load(RECIPE) | {"model": yaml.safe_load(model)}
    Path(recipe).write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert len(planned(recipe, Asked(SETTINGS), anywhere=True).configs) == 4
    tree["model"]["trust_remote_code"] = False
    Path(recipe).write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(UserError, match="trust_remote_code"):
        planned(recipe, Asked(SETTINGS), anywhere=True)
