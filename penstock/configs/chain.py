"""A chain: stages that follow each other in one recipe, where a stage may use what an earlier one leaves.

    name: sums
    stages:
      imitate: {does: sft, base: quickstart.yaml}
      learn:   {does: train, base: quickstart.yaml, sft: null, model: {tiny: null, path: stage:imitate}}

Apart from `does`, a stage is what that command takes: a recipe, with a `base` of its own, or the options of `select`.
The value `stage:NAME` stands for what the stage of that name leaves: its model, or the file that it has selected.

Left out: what a stage leaves and where (penstock/state/chain.py), checks that need models or data
(penstock/session/chains/plan.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from penstock.base.errors import UserError
from penstock.base.names import nearest_name
from penstock.configs.loading.load import parse_override, tree_of
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import compose, dump, merge, read_tree
from penstock.configs.tree.section import PositiveInt, Recipe, refuse

STAGE = "stage:"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
SELECT = "select"
OF_CHAIN = ("name", "folder")  # keys of a chain that an override may give
EXAMPLE = "docs/recipes.md, 'A chain', shows one"


class SelectConfig(Recipe):
    """What a stage takes of a training's responses; the options of `penstock select`."""

    run: str = Field(description="stage:NAME of a training, whose responses they are")
    best: PositiveInt | None = Field(None, description="most responses to a prompt; null: 1")
    least: float | None = Field(None, description="lowest reward that is taken; null: any")
    pairs: bool = Field(False, description="the best and the worst response to each prompt")
    margin: float | None = Field(None, ge=0, description="with pairs: by which their rewards have to differ")

    @model_validator(mode="after")
    def _in_force(self) -> Self:
        if self.pairs:
            refuse(self, ("best", "least"), "with 'pairs'")
        else:
            refuse(self, ("margin",), "without 'pairs'")
        return self


TREES: Mapping[str, type[Recipe]] = {
    "sft": TrainConfig,
    "preference": PreferenceConfig,
    "reward-model": RewardModelConfig,
    "train": TrainConfig,
    SELECT: SelectConfig,
}
# Keys that may name a stage, and what that stage has to do.
TAKES = {
    "model.path": ("sft", "preference", "train"),
    "critic.path": ("sft", "preference", "train", "reward-model"),
    "reward.model": ("reward-model",),
    "data.train": (SELECT,),
    "data.heldout": (SELECT,),
    "data.sft": (SELECT,),
    "run": ("train",),
}


class ChainConfig(BaseModel):
    """A chain as it is written."""

    model_config = {"extra": "forbid", "frozen": True}

    name: str = Field("chain", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: str = "runs"
    stages: dict[str, dict[str, Any]] = Field(min_length=1)


@dataclass(frozen=True)
class Stage:
    """One stage: its name, what it does, and the tree of its recipe, which may name earlier stages."""

    name: str
    does: str
    tree: Mapping[str, Any]

    @property
    def selects(self) -> bool:
        """Whether it takes the best of what a training has said, and trains nothing."""
        return self.does == SELECT

    @property
    def named(self) -> dict[str, str]:
        """Names of the stages that its values stand for, by key."""
        return {key: value.removeprefix(STAGE) for key, value in _leaves(self.tree) if _names_stage(value)}

    def with_values(self, values: Mapping[str, Any]) -> Stage:
        """Return it with other values, by key; None takes one back."""
        tree = dict(self.tree)
        for key, value in values.items():
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            tree = merge(tree, nested)
        return replace(self, tree=tree)

    def config(self, kind: type[Any]) -> Any:
        """Return the configuration that its tree describes.

        Raises:
            UserError: lists every wrong key; names the stage.
        """
        return tree_of(self.tree, (), f"stage '{self.name}'", kind)


@dataclass(frozen=True)
class Chain:
    """A chain whose stages are whole: no recipe is read any more."""

    name: str
    folder: str
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """Return the stage of a name that is there."""
        return next(stage for stage in self.stages if stage.name == name)

    def to_yaml(self) -> str:
        """Return it as a recipe that reads back to an equal chain."""
        stages = {stage.name: {"does": stage.does, **stage.tree} for stage in self.stages}
        return dump({"name": self.name, "folder": self.folder, "stages": stages})


def read_chain(recipe: Path, overrides: Sequence[str] = (), *, anywhere: bool = True) -> Chain:
    """Return the chain of a recipe, each stage laid over its `base`.

    Args:
        overrides: `STAGE.section.key=value`, or `name=value` and `folder=value` of the chain itself.
        anywhere: whether the recipe may lie anywhere, as for a person at a terminal; else where recipes of a form may.

    Raises:
        UserError: a file, a key or a value is wrong, or a stage names one that cannot serve it.
    """
    tree = read_tree(recipe) if anywhere else compose({"base": str(recipe)}, Path.cwd())
    written = _written(tree, str(recipe))
    stages = {name: _stage(name, values, recipe.parent) for name, values in written.stages.items()}
    head = {"name": written.name, "folder": written.folder}
    for text in overrides:
        first, _, rest = text.partition(".")
        if first in stages:
            upper = parse_override(rest, TREES[stages[first].does])
            stages[first] = replace(stages[first], tree=merge(stages[first].tree, upper))
        else:
            _check_of_chain(text, stages)
            head |= parse_override(text, ChainConfig)
    written = _written({**head, "stages": written.stages}, str(recipe))
    chain = Chain(written.name, written.folder, tuple(_in_folder(stage, written.folder) for stage in stages.values()))
    _check(chain)
    return chain


def _written(tree: Mapping[str, Any], source: str) -> ChainConfig:
    try:
        return ChainConfig.model_validate(dict(tree))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{source} is no chain: {where}: {first['msg']}", EXAMPLE) from None


def _stage(name: str, values: Mapping[str, Any], folder: Path) -> Stage:
    """Return a stage, laid over its `base`; its run has its name, unless it gives another."""
    does, tree = str(values.get("does")), {key: value for key, value in values.items() if key != "does"}
    if does not in TREES:
        near = nearest_name(does, TREES)
        guess = f"; did you mean '{near}'?" if near else ""
        raise UserError(f"stage '{name}': 'does' is one of {', '.join(TREES)} (given: {does!r}{guess})", EXAMPLE)
    whole = compose(tree, folder, f"stage '{name}'")
    return Stage(name, does, whole if does == SELECT or "name" in tree else {**whole, "name": name})


def _in_folder(stage: Stage, folder: str) -> Stage:
    """Return a stage that trains in the directory of the chain, where versions of registered models are known, too."""
    return stage if stage.does == SELECT else replace(stage, tree={**stage.tree, "folder": folder})


def _check_of_chain(text: str, stages: Mapping[str, Stage]) -> None:
    """Refuse an override that is neither a stage's nor of the chain itself."""
    key = text.partition("=")[0].strip()
    if key in OF_CHAIN:
        return
    near = nearest_name(key.partition(".")[0], stages)
    guess = f"; did you mean '{near}'?" if near else ""
    raise UserError(f"the override '{text}' begins with no stage's name{guess}", f"stages are {', '.join(stages)}")


def _check(chain: Chain) -> None:
    """Check the values of every stage, and that those which stand for stages can."""
    for number, stage in enumerate(chain.stages):
        if not re.match(NAME, stage.name):
            raise UserError(f"'{stage.name}' is no name of a stage", "use letters, digits, - and _")
        earlier = {one.name: one.does for one in chain.stages[:number]}
        for key, named in stage.named.items():
            _check_place(stage, key, named, earlier)
        config = stage.config(TREES[stage.does])
        if stage.does == SELECT and not _names_stage(config.run):
            raise UserError(f"stage '{stage.name}': 'run' is {config.run}", f"give {STAGE}NAME of an earlier training")


def _check_place(stage: Stage, key: str, named: str, earlier: Mapping[str, str]) -> None:
    """Refuse a value that stands for a stage which is not there, comes later, or leaves something else."""
    said = f"stage '{stage.name}': '{key}' is {STAGE}{named}"
    if key not in TAKES:
        raise UserError(f"{said}, and no stage leaves what it wants", f"keys that take one are {', '.join(TAKES)}")
    if named not in earlier:
        known = ", ".join(earlier) or "none"
        raise UserError(f"{said}, and no earlier stage has that name", f"earlier stages are: {known}")
    if earlier[named] not in TAKES[key]:
        raise UserError(
            f"{said}, a stage that does '{earlier[named]}'", f"name one that does {' or '.join(TAKES[key])}"
        )


def _names_stage(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(STAGE)


def _leaves(tree: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        whole = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping):
            yield from _leaves(value, whole)
        else:
            yield whole, value
