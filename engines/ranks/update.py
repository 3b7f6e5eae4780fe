"""Updates of a rank's actor, and what every update reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from engines.batches.packing import Rows, read_rows
from engines.commands.update import Split, UpdateActor, Updated
from engines.ranks.models import CountedModel, RankModels
from engines.ranks.reference import head_of_reference
from engines.ranks.serving.handlers import carries_out
from engines.ranks.serving.usage import work_on
from engines.training import updates
from engines.training.collective_times import timed_collectives
from engines.training.full_kl import with_states
from engines.training.trainer import Trainer
from penstock.state.experience import column_names

OPTIONAL = ("logprobs_old", "logprobs_reference", "logprobs_rollout")  # columns that an update looks at if they exist


@carries_out(UpdateActor)
def update_actor(models: RankModels, command: UpdateActor) -> Updated:
    """Train on experience of the policy that the last reshard verified.

    Raises:
        RuntimeError: the experience comes from a version that no reshard has verified here.
    """
    if command.version != models.verified_version:
        raise RuntimeError(
            f"experience of policy version {command.version}; verified is {models.verified_version}: not trained on it"
        )
    present = column_names(command.path)
    wanted = ("advantages", *(name for name in OPTIONAL if name in present))
    rows, head = read_rows(command.path, wanted), None
    if command.states is not None:
        rows, head = with_states(rows, command.states), head_of_reference(models)
    plan, trainer, models.updated_since = command.split, models.trainers["actor"], True
    update = partial(updates.update_actor, trainer, rows, plan, command.loss, command.learning_rate, head)
    return Updated(measured(models, rows, "actor", trainer, plan, update))


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
    timing = timed_collectives(models.device) if models.world_size > 1 else nullcontext()
    with timing as times, trainer.states_on_device():
        metrics = update()
    if times is not None:
        models.use({"communication_s": times.seconds()})
    return {**metrics, "skipped_steps": float(trainer.skipped - before)}
