"""The placements in configs/placement: each fits the recipes that its comment names, and no other algorithm by chance.

What a placement and an algorithm do not have in common is refused, as in a recipe with groups of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.base.errors import UserError
from penstock.configs.loading.load import load_config
from penstock.engines.groups.placement import place

ROOT = Path(__file__).resolve().parents[2]
REWARD_MODEL: dict[str, Any] = {"reward": {"function": None, "model": "models/reward"}, "algorithm": {"kl": None}}
PPO_ROLES = ("actor", "critic", "reference", "rollout")
# Placement, recipe, what else it needs, GPUs of the machine, and what its comment says: group, roles, GPUs.
FITTING: list[tuple[str, str, dict[str, Any], int, dict[str, tuple[tuple[str, ...], list[int]]]]] = [
    ("colocated", "ppo_gsm8k", {}, 2, {"main": (PPO_ROLES, [0, 1])}),
    ("colocated", "grpo_gsm8k", {}, 8, {"main": (("actor", "reference", "rollout"), [*range(8)])}),
    (
        "split",
        "grpo_gsm8k",
        {},
        8,
        {"train": (("actor", "reference"), [0, 1, 2, 3]), "generate": (("rollout",), [4, 5, 6, 7])},
    ),
    (
        "four-gpu",
        "ppo_gsm8k",
        REWARD_MODEL,
        4,
        {"policy": (("actor", "rollout"), [0, 1]), "critic": (("critic",), [2]), "reward": (("reward",), [3])},
    ),
    (
        "seven-gpu",
        "ppo_gsm8k",
        {},
        7,
        {
            "policy": (("actor", "rollout"), [0, 1, 2, 3]),
            "critic": (("critic",), [4, 5]),
            "reference": (("reference",), [6]),
        },
    ),
]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _recipe(folder: Path, placement: str, name: str, tree: dict[str, Any]) -> Path:
    recipe = folder / "recipe.yaml"
    base = [f"configs/{name}.yaml", f"configs/placement/{placement}.yaml"]
    recipe.write_text(yaml.safe_dump({"base": base, **tree}), encoding="utf-8")
    return recipe


@pytest.mark.parametrize(
    ("placement", "name", "tree", "gpus", "said"), FITTING, ids=[f"{a}-{b}" for a, b, *_ in FITTING]
)
def test_a_placement_places_as_its_comment_says(
    placement: str,
    name: str,
    tree: dict[str, Any],
    gpus: int,
    said: dict[str, tuple[tuple[str, ...], list[int]]],
    tmp_path: Path,
) -> None:
    """Through `base` in a recipe. Control: a machine with a GPU less has too few."""
    config = load_config(_recipe(tmp_path, placement, name, tree))
    specs = place(config, gpus, Path())
    assert {spec.name: (spec.roles, [device.gpu for device in spec.devices]) for spec in specs} == said
    if placement != "colocated":
        with pytest.raises(UserError, match=f"names GPU {gpus - 1}"):
            place(config, gpus - 1, Path())


def test_each_placement_is_tested() -> None:
    """Those of the folder, and none that is not there."""
    there = {path.stem for path in (ROOT / "configs" / "placement").glob("*.yaml")}
    assert there == {placement for placement, *_ in FITTING}


def test_a_placement_is_named_on_the_command_line() -> None:
    """Without a recipe of one's own. Control: the recipe alone has no groups."""
    recipe = ROOT / "configs" / "ppo_gsm8k.yaml"
    placed = load_config(recipe, ["base=configs/placement/seven-gpu.yaml", "groups.critic.gpus=[5]"])
    assert {name: group.gpus for name, group in placed.groups.items()} == {
        "policy": [0, 1, 2, 3],
        "critic": [5],
        "reference": [6],
    }
    assert load_config(recipe).groups == {}


def test_one_group_takes_back_those_of_a_recipe(tmp_path: Path) -> None:
    """`colocated` over another placement. Control: without it the other is in force."""
    (tmp_path / "mine.yaml").write_text("base: [configs/ppo_gsm8k.yaml, configs/placement/seven-gpu.yaml]\n")
    (tmp_path / "recipe.yaml").write_text("base: [mine.yaml, configs/placement/colocated.yaml]\n")
    assert len(load_config(tmp_path / "mine.yaml").groups) == 3
    assert load_config(tmp_path / "recipe.yaml").groups == {}


@pytest.mark.parametrize(
    ("placement", "name", "refused"),
    [
        ("split", "ppo_gsm8k", "'groups' places no critic"),
        ("four-gpu", "ppo_gsm8k", "'groups' places no reference"),
        ("seven-gpu", "grpo_gsm8k", "'groups' places critic, which this algorithm and reward do not use"),
        ("split", "bench_grpo", "'groups' places reference, which this algorithm and reward do not use"),
    ],
)
def test_an_algorithm_that_does_not_fit_is_refused(placement: str, name: str, refused: str, tmp_path: Path) -> None:
    """With the role that is missing, or that nothing uses. Controls: the recipes above."""
    with pytest.raises(UserError, match=refused):
        load_config(_recipe(tmp_path, placement, name, {}))
