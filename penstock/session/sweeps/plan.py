"""A sweep planned: its combinations, each of them checked as its training would be, before the first one begins.

Left out: the combinations themselves (penstock/configs/loading/sweep.py), which GPUs a training gets (lanes.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.checks.found_models import with_models_found
from penstock.configs.loading.load import parse_override, tree_of
from penstock.configs.loading.sweep import Overrides, drawn, grid, parse_axes
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import compose, dump, read_mapping, read_tree
from penstock.data.source import reading_once
from penstock.reports.sweep import figure_of
from penstock.session.opening import TRAIN, foreseen
from penstock.session.sweeps.lanes import Lane, lanes_for, seen
from penstock.state.run_folder import check_place, new_run_folder
from penstock.state.sweep import Planned, Sweep, SweepFolder, read_sweep, write_sweep

SUFFIX = "-sweep"
SWEEP_TAG = "sweep:"  # before the name of its folder, a tag of its flow runs and of those of its trainings
NAME_CHARACTERS = 100  # of a run folder; file systems take 255 bytes
BY = "heldout/accuracy"


@dataclass(frozen=True)
class Asked:
    """What a sweep is asked for; see `penstock.state.sweep.Sweep`."""

    settings: tuple[str, ...]
    random: int | None = None
    draw_seed: int = 0
    by: str = BY
    at_once: int | None = None


@dataclass(frozen=True)
class Plan:
    """A sweep that can begin: what was asked for, the recipe's tree, and where its trainings run.

    Attributes:
        configs: of the trainings, by their names.
    """

    sweep: Sweep
    tree: Mapping[str, Any]
    configs: Mapping[str, TrainConfig]
    lanes: Sequence[Lane]

    @property
    def first(self) -> TrainConfig:
        """The configuration of the first training: name, folder and record are those of all."""
        return next(iter(self.configs.values()))


def planned(recipe: str, asked: Asked, *, anywhere: bool) -> Plan:
    """Plan a sweep and check every training of it.

    Args:
        recipe: path of a YAML recipe.
        anywhere: whether it may lie anywhere, as for a person at a terminal; else where recipes of a form may lie.

    Raises:
        UserError: what is asked for is wrong, or a training cannot work; names its combination.
    """
    figure_of(asked.by)
    tree = read_tree(Path(recipe)) if anywhere else compose({"base": recipe}, Path.cwd())
    axes = parse_axes(asked.settings)
    combinations = grid(axes) if asked.random is None else drawn(axes, asked.random, asked.draw_seed)
    varied = [axis.key for axis in axes if axis.varies]
    trainings = [Planned(name=name, overrides=overrides) for name, overrides in named(combinations, varied).items()]
    sweep = Sweep(recipe=recipe, trainings=tuple(trainings), **vars(asked))
    return check(sweep, tree)


def check(sweep: Sweep, tree: Mapping[str, Any]) -> Plan:
    """Check every training of a sweep, also of one that goes on.

    Raises:
        UserError: what each of them would raise; names the combination.
    """
    configs: dict[str, TrainConfig] = {}
    with reading_once():
        for training in sweep.trainings:
            with _naming(sweep, training):
                configs[training.name] = config_of(training, tree)
        lanes = lanes_for(list(configs.values()), sweep.at_once)
        for training in sweep.trainings:
            with _naming(sweep, training), seen(lanes[0]):
                config = with_models_found(configs[training.name])
                TRAIN.check(config)
                foreseen(TRAIN, config)
    check_place(Path(next(iter(configs.values())).folder))
    return Plan(sweep, tree, configs, lanes)


def begin_sweep(recipe: str | None, asked: Asked, resume: str | None) -> SweepFolder:
    """Return the folder of a sweep that a form asks for: a new one, or that of the one to go on with.

    Raises:
        UserError: neither is named or both are, or the sweep cannot begin.
    """
    if resume is not None and (recipe is not None or asked.settings):
        raise UserError("a sweep goes on as it was asked for", "give 'resume', or 'recipe' and 'settings'")
    if resume is not None:
        return SweepFolder(Path(resume).resolve())
    if recipe is None:
        raise UserError("no recipe given", "name one, e.g. configs/quickstart.yaml")
    return begin(planned(recipe, asked, anywhere=False))


def begin(plan: Plan) -> SweepFolder:
    """Make the folder of a sweep, from which it can be resumed."""
    folder = SweepFolder(new_run_folder(Path(plan.first.folder), _own_name(plan.tree, plan.sweep) + SUFFIX).path)
    write_text(folder.recipe, dump(plan.tree))
    write_sweep(folder, plan.sweep)
    return folder


def taken_up(folder: SweepFolder, at_once: int | None = None) -> Plan:
    """Plan what is left of a sweep, as it was asked for.

    Args:
        at_once: trainings at a time from now on; None: as before.

    Raises:
        UserError: there is no sweep, or a training cannot work any more.
    """
    sweep = read_sweep(folder)
    return check(sweep.model_copy(update={"at_once": at_once or sweep.at_once}), read_mapping(folder.recipe))


def config_of(training: Planned, tree: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a training, which has its name.

    Raises:
        UserError: a value is wrong.
    """
    overrides = [parse_override(text, TrainConfig) for text in (*training.overrides, f"name={training.name}")]
    return tree_of(tree, overrides, "the recipe with it", TrainConfig)


def named(combinations: Sequence[Overrides], varied: Sequence[str]) -> dict[str, Overrides]:
    """Return the combinations by the names of their run folders: a number, and what varies in short."""
    width = len(str(len(combinations)))
    return {
        f"{number:0{width}d}-{_short(overrides, varied)}"[:NAME_CHARACTERS].rstrip("-."): overrides
        for number, overrides in enumerate(combinations, start=1)
    }


def _short(overrides: Overrides, varied: Sequence[str]) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{key.rpartition('.')[2]}-{value}" for key, _, value in pairs if key in varied]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))


def _own_name(tree: Mapping[str, Any], sweep: Sweep) -> str:
    """Return the name that the recipe, or a setting of the sweep, gives a run."""
    given = [item.partition("=")[2].strip() for item in sweep.settings if item.partition("=")[0].strip() == "name"]
    return str(given[0] if given else tree.get("name", TrainConfig.model_fields["name"].default))


@contextmanager
def _naming(sweep: Sweep, training: Planned) -> Iterator[None]:
    """Say of which combination a mistake is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{sweep.own(training)}: {error.problem}", error.remedy) from error
