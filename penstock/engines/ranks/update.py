"""Updates of a rank's actor, and what every update reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from penstock.engines.batches.packing import Rows, read_rows
from penstock.engines.commands.update import Split, StepActor, SumGradient, UpdateActor, Updated
from penstock.engines.ranks.models import CountedModel, RankModels
from penstock.engines.ranks.reference import head_of_reference
from penstock.engines.ranks.serving.handlers import carries_out, in_portions
from penstock.engines.ranks.serving.usage import work_on
from penstock.engines.training import updates
from penstock.engines.training.collective_times import timed_collectives
from penstock.engines.training.full_kl import with_states
from penstock.engines.training.portions import Portions, add_portion, take_step
from penstock.engines.training.trainer import Trainer
from penstock.state.experience import column_names

OPTIONAL = ("logprobs_old", "logprobs_reference", "logprobs_rollout")  # columns that an update looks at if they exist


@carries_out(UpdateActor)
def update_actor(models: RankModels, command: UpdateActor) -> Updated:
    """Train on experience of the policy that the last reshard verified; raises as `_rows`."""
    rows, head = _rows(models, command.path, command.version), None
    if command.states is not None:
        rows, head = with_states(rows, command.states), head_of_reference(models)
    plan, trainer, models.updated_since = command.split, models.trainers["actor"], True
    update = partial(updates.update_actor, trainer, rows, plan, command.loss, command.learning_rate, head)
    return Updated(measured(models, rows, "actor", trainer, plan, update))


@carries_out(SumGradient, during_generation=in_portions, beside=True)
def sum_gradient(models: RankModels, command: SumGradient) -> None:
    """Add a portion of an iteration to the actor's gradient; raises as `_rows`."""
    rows, trainer, split = _rows(models, command.path, command.version), models.trainers["actor"], command.split
    index_B = np.arange(len(rows))
    if command.groups is not None:
        index_B = index_B.reshape(-1, split.samples)[command.groups].reshape(-1)
        models.use(work_on(models, rows.take(index_B), "actor", 1))
    else:
        models.use(work_on(models, rows, "actor", 1))
    if command.first:
        trainer.forget_gradient()
        models.portions = Portions()
    with _collectives_timed(models):
        add_portion(models.portions, trainer, rows, index_B, split, command.loss, command.last)


@carries_out(StepActor)
def step_actor(models: RankModels, command: StepActor) -> Updated:
    """Take the actor's step on the gradient that is summed."""
    trainer, portions = models.trainers["actor"], models.portions
    models.portions, models.updated_since, before = Portions(), True, trainer.skipped
    with trainer.states_on_device():
        limit = command.max_response_tokens
        metrics = take_step(portions, trainer, command.aggregation, limit, command.learning_rate)
    return Updated({**metrics, "skipped_steps": float(trainer.skipped - before)})


def _rows(models: RankModels, path: str, version: int) -> Rows:
    """Read what an update reads.

    Raises:
        RuntimeError: the experience comes from a version that no reshard has verified here.
    """
    if version != models.verified_version:
        raise RuntimeError(
            f"experience of policy version {version}; verified is {models.verified_version}: not trained on it"
        )
    present = column_names(path)
    columns = ("advantages", *(name for name in OPTIONAL if name in present))
    return read_rows(path, columns, models.config.actor.replays)


def measured(
    models: RankModels,
    rows: Rows,
    role: CountedModel,
    trainer: Trainer,
    plan: Split,
    update: Callable[[], dict[str, float]],
) -> dict[str, float]:
    """Run an update on `rows`, and count the steps it skips; with several ranks, take its collectives' time."""
    models.use(work_on(models, rows, role, plan.epochs))
    before = trainer.skipped
    with _collectives_timed(models), trainer.states_on_device():
        metrics = update()
    return {**metrics, "skipped_steps": float(trainer.skipped - before)}


@contextmanager
def _collectives_timed(models: RankModels) -> Iterator[None]:
    """With several ranks, take the time of the block's collectives."""
    if models.world_size == 1:
        yield
        return
    with timed_collectives(models.device) as times:
        yield
    models.use({"communication_s": times.seconds()})
