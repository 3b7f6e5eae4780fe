"""What a sweep varies: what is read of it, every combination, what chance takes of it, and what is refused."""

from __future__ import annotations

import math
import statistics

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.sweep import drawn, grid, parse_axes

RATE = "actor.optimizer.learning_rate"


def test_a_grid_has_every_combination_once() -> None:
    """In the order of the values, as they are written. Control: a key with one value multiplies nothing."""
    axes = parse_axes([f"{RATE}=1e-6,3e-6", "seed=0,1,2", "iterations=5"])
    combinations = grid(axes)
    assert len(combinations) == len(set(combinations)) == 6
    assert combinations[0] == (f"{RATE}=1e-6", "seed=0", "iterations=5")
    assert combinations[1] == (f"{RATE}=1e-6", "seed=1", "iterations=5")
    assert combinations[-1] == (f"{RATE}=3e-6", "seed=2", "iterations=5")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("groups.main.gpus=[0,1],[2,3]", ("[0,1]", "[2,3]")),
        ("rollout.tail={extra: 0.5},null", ("{extra: 0.5}", "null")),
        ("algorithm.name=grpo, ppo", ("grpo", "ppo")),
        ("rollout.temperature={0: 1.0, 4: 0.9}, 1.0", ("{0: 1.0, 4: 0.9}", "1.0")),
        ("data.prompt='a,b',c", ("'a,b'", "c")),
    ],
)
def test_brackets_braces_and_quotes_hold_commas_together(text: str, values: tuple[str, ...]) -> None:
    """As in a list of YAML. Control: commas outside of them part values."""
    assert parse_axes([text])[0].values == values


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["seed"], "'seed' is not key=value,value"),
        (["seed=0,1", "seed=2"], "'seed' is given twice"),
        (["seed=0"], "a sweep of nothing"),
        ([], "a sweep of nothing"),
        (["sede=0,1"], "names no key; did you mean 'seed'"),
        (["seed=0,1,1"], "has 1 twice"),
        (["seed=0,,1"], "'seed=0,,1'"),
        (["name=a,b"], "a sweep names its runs itself"),
        ([f"{RATE}=1e-5..1e-6"], "ends where it begins, or before"),
        (["data.prompt=[a,b"], "'data.prompt=[a,b'"),
    ],
)
def test_mistakes_are_named(settings: list[str], problem: str) -> None:
    """Before anything is planned. Controls: the settings above."""
    with pytest.raises(UserError) as caught:
        parse_axes(settings)
    assert problem in str(caught.value)


def test_chance_takes_some_of_a_grid_with_all_of_their_seeds() -> None:
    """None twice, the same with the same seed. Control: with another seed others."""
    axes = parse_axes(["rollout.samples=2,4,8,16", "algorithm.mini_batches=1,2,4", "seed=0,1"])
    taken = drawn(axes, 5, seed=1)
    assert len(taken) == len(set(taken)) == 10
    settings = [item[:2] for item in taken]
    assert settings[0::2] == settings[1::2]
    assert [item[2] for item in taken] == ["seed=0", "seed=1"] * 5
    assert drawn(axes, 5, seed=1) == taken
    assert drawn(axes, 5, seed=2) != taken
    assert {item[:2] for item in drawn(axes, 12, seed=0)} == {item[:2] for item in grid(axes)}
    with pytest.raises(UserError, match="--random 13 of 12 combinations"):
        drawn(axes, 13, seed=0)


def test_a_range_of_several_tens_is_drawn_by_its_logarithm() -> None:
    """Half of the draws are below the geometric mean. Control: of a narrow range half are below its middle."""
    wide = [float(item[0].partition("=")[2]) for item in drawn(parse_axes([f"{RATE}=1e-6..1e-2"]), 400, seed=0)]
    assert min(wide) >= 1e-6 and max(wide) <= 1e-2
    assert statistics.median(map(math.log10, wide)) == pytest.approx(-4, abs=0.3)
    narrow = [float(item[0].partition("=")[2]) for item in drawn(parse_axes([f"{RATE}=1e-6..9e-6"]), 200, seed=0)]
    assert statistics.median(narrow) == pytest.approx(5e-6, rel=0.1)


def test_whole_numbers_are_drawn_between_whole_numbers() -> None:
    """Each of them comes, and there are no more of them than there are. Control: a range of other numbers."""
    axes = parse_axes(["rollout.samples=2..5"])
    assert {item[0] for item in drawn(axes, 4, seed=0)} == {f"rollout.samples={number}" for number in (2, 3, 4, 5)}
    with pytest.raises(UserError, match="hold only 4"):
        drawn(axes, 5, seed=0)
    assert len(drawn(parse_axes(["rollout.temperature=0.5..1.5"]), 50, seed=0)) == 50


def test_a_range_needs_a_number_of_draws() -> None:
    """Control: a list does not."""
    with pytest.raises(UserError, match=r"is a range(.|\n)*--random N"):
        grid(parse_axes([f"{RATE}=1e-6..1e-5", "seed=0,1"]))
    assert len(grid(parse_axes([f"{RATE}=1e-6,1e-5", "seed=0,1"]))) == 4
