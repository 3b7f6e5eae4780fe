"""Checkpoint: all that a run needs to go on, written aside, hashed, renamed; then the manifest moves. And back."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.schema import TrainConfig
from engines.commands.checkpoint import Load, Save
from engines.groups.placement import reshard_strategy
from engines.sizing.memory import GIB
from penstock.base.files import empty_beside
from penstock.session.record import append_record
from penstock.session.rollout.draw import restore_memory
from penstock.session.session import Training, timed
from penstock.state.manifest import (
    Manifest,
    Progress,
    prune_checkpoints,
    read_manifest,
    reopen,
    seal_checkpoint,
    write_manifest,
)
from penstock.state.run_folder import drop_lost_experience, truncate_metrics
from tasks.iteration.reshard import bring_weights


def checkpoint_due(config: TrainConfig, number: int) -> bool:
    """Whether iteration `number` ends with a checkpoint."""
    every = config.checkpoint.every
    return every > 0 and (number % every == 0 or number == config.iterations)


@task(task_run_name="checkpoint-{progress.iteration:06d}", cache_policy=NO_CACHE)
def save_checkpoint(training: Training, progress: Progress) -> None:
    """Make the state after `progress.iteration` durable; its seconds and size join the iteration's figures."""
    run = training.run
    metrics: dict[str, float] = {}
    final = run.checkpoint(progress.iteration)
    reached = manifest(training, progress, final.name)
    training.session().say("checkpoint")
    with timed(training, metrics, "checkpoint"):
        aside = empty_beside(final)
        save = Save(str(aside))
        training.session().call_all(
            dict.fromkeys(training.session().distinct_groups, save), f"{progress.iteration}/save"
        )
        metrics["checkpoint/gib"] = seal_checkpoint(aside, final, run, reached) / GIB
    append_record(training, progress.iteration, metrics)  # before the manifest: a resume goes on after this line
    training.session().consolidator.wait()
    write_manifest(run, reached)
    prune_checkpoints(run, training.config.checkpoint.keep, final.name)


@task(task_run_name="restore", cache_policy=NO_CACHE)
def restore(training: Training) -> Progress:
    """Bring the engines to the manifest's checkpoint, which is whole, and forget what was made and recorded after it.

    Raises:
        UserError: a file of the checkpoint names what no state needs.
    """
    run, saved = training.run, read_manifest(training.run)
    done, version = saved.progress.iteration, saved.progress.policy_version
    folder = None
    if saved.checkpoint is not None:
        training.session().say("loading the checkpoint", saved.checkpoint)
        folder = run.checkpoints / saved.checkpoint
        groups = training.session().distinct_groups
        training.session().call_all(dict.fromkeys(groups, Load(str(folder), version)), f"{done}/load")
        if reshard_strategy(training.config) == "broadcast":
            bring_weights(training.session(), f"{done}/load-reshard", version)
    prune_checkpoints(run, training.config.checkpoint.keep, saved.checkpoint)
    if done < training.config.iterations:
        reopen(run)
    truncate_metrics(run, done if saved.checkpoint else -1)
    restore_memory(training, folder, done)
    drop_lost_experience(run, done)
    return saved.progress


def manifest(training: Training, progress: Progress, checkpoint: str | None) -> Manifest:
    """Return the manifest of this training at `progress`."""
    session = training.session()
    return Manifest(
        progress=progress,
        checkpoint=checkpoint,
        model=session.model_folder,
        tracked=session.tracked,
        kind=session.kind,
        prefect_flow_run_id=session.prefect_flow_run_id,
    )


def begin_manifest(training: Training, progress: Progress) -> Progress:
    """Write the manifest of a run that has no checkpoint yet: a resume then starts from the first iteration."""
    write_manifest(training.run, manifest(training, progress, None))
    return progress
