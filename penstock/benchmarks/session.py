"""Starts a recipe's engines for a benchmark as `train` does, without a flow: no Prefect server, no MLflow, no records.

The tasks of an iteration are called as plain functions (`task.fn`), so what is measured is the code that trains.
Left out: everything that a run folder keeps; it is temporary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.logging import disable_run_logger

from penstock.benchmarks.workload.prompts import with_prompts
from penstock.checks.memory import GroupEstimate, check_memory, estimate_groups
from penstock.checks.model.starting_model import check_model
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import ModelShape, read_shape
from penstock.engines.groups.hosts import Hosts
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import place
from penstock.reports.progress import TrainingProgress
from penstock.session.machines.hosts import Machines
from penstock.session.session import Training, open_session
from penstock.session.settings import Settings, settings_at
from penstock.state.manifest import Progress
from penstock.state.run_folder import new_run_folder
from penstock.tasks.start import attention_of, build_engines, load_prompts, starting_model


def load_recipe(recipe: Path, overrides: list[str], folder: Path) -> TrainConfig:
    """Return a recipe's configuration, with the benchmark's prompts (written to `folder`) where it names no data."""
    return load_config(recipe, [*overrides, *with_prompts(load_config(recipe, overrides), folder)])


@contextmanager
def groups_of(
    config: TrainConfig, memory: list[GroupEstimate] | None = None
) -> Iterator[tuple[Training, TrainingProgress]]:
    """Start the recipe's engine groups, empty, in a temporary run folder; they end with the context.

    Args:
        memory: the estimates that the free memory was checked with; None: it is not checked.

    Raises:
        UserError: the recipe has no model, or a device is not there.
    """
    check_model(config)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, disable_run_logger():
        run = new_run_folder(Path(scratch), "bench")
        decided = estimate_groups(config) if memory is None else memory
        with (
            TrainingProgress() as progress,
            Hosts(run.logs) as hosts,
            open_session(config, run, decided, Machines(hosts)) as training,
        ):
            training.session().progress = progress
            yield training, progress


def load_roles(training: Training, roles: tuple[Role, ...]) -> ModelShape:
    """Load the models of some roles alone, the actor's among them; return its sizes."""
    session = training.session()
    folder = session.model_folder = starting_model.fn(training)
    session.say(f"loading {' and '.join(roles)}")
    for group in session.distinct_groups:
        if held := [role for role in group.spec.roles if role in roles]:
            replies = session.call_all({group: session.build(held)}, "0/build")[group]
            session.engine_figures["attention"] = attention_of(replies[0].kernels)
    return read_shape(Path(folder))


@contextmanager
def rollout_groups(config: TrainConfig) -> Iterator[tuple[Training, TrainingProgress]]:
    """Start the recipe's groups with every model but a reward's, its prompts tokenized.

    Raises:
        UserError: the recipe has no model or no data, a device is not there, or the memory does not suffice.
    """
    config = config.model_copy(update={"reward": RewardConfig()})
    check_model(config)
    with groups_of(config, check_memory(config)) as (training, progress):
        folder = starting_model.fn(training)
        load_prompts.fn(training, folder)
        build_engines.fn(training, folder)
        yield training, progress


def settings_of(config: TrainConfig, iteration: int) -> Settings:
    """Return the values in force at an iteration, without live overrides."""
    return settings_at(config, iteration, Progress())


def device_count(config: TrainConfig, role: Role | None = None) -> int:
    """Return how many GPUs (or CPU ranks) the recipe uses, for one role or for all."""
    specs = place(config, len(visible_gpus()), Path())
    return sum(len(spec.devices) for spec in specs if role is None or role in spec.roles)


def describe(config: TrainConfig) -> dict[str, object]:
    """Return what a result file keeps of the recipe."""
    tree = config.model_dump(mode="json")
    kept = ("seed", "model", "rollout", "algorithm", "actor", "critic", "groups")
    return {name: tree[name] for name in kept if tree[name]}
