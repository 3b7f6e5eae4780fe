"""Checkpoint: all that a run needs to go on, written aside, hashed, renamed; then the manifest moves. And back.

Hosts write it from a snapshot, behind the training's back (penstock/session/saving/checkpoints.py).
"""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.files import discarded, empty_beside
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.checkpoint import Load, Save
from penstock.engines.groups.hosts import HostFailed
from penstock.engines.groups.placement import reshard_strategy
from penstock.engines.sizing.memory import GIB
from penstock.session.events import recovered
from penstock.session.record import append_record
from penstock.session.rollout.draw import restore_memory
from penstock.session.session import Training, timed
from penstock.state.experience import RESAMPLED, column_names
from penstock.state.manifest import (
    Manifest,
    Progress,
    accompany,
    name_checkpoint,
    prune_checkpoints,
    read_manifest,
    reopen,
    write_manifest,
)
from penstock.state.run_folder import drop_lost_experience, read_metrics, truncate_metrics
from penstock.tasks.iteration.reshard import bring_weights


def checkpoint_due(config: TrainConfig, number: int) -> bool:
    """Whether iteration `number` ends with a checkpoint."""
    every = config.checkpoint.every
    return every > 0 and (number % every == 0 or number == config.iterations)


@task(task_run_name="checkpoint-{progress.iteration:06d}", cache_policy=NO_CACHE)
def save_checkpoint(training: Training, progress: Progress) -> None:
    """Make the state after `progress.iteration` durable; its seconds and size join the iteration's figures.

    Where there is a snapshot of it, hosts write that while the training goes on; else the ranks write.
    """
    session, run, number = training.session(), training.run, progress.iteration
    metrics: dict[str, float] = {}
    final = run.checkpoint(number)
    reached = manifest(training, progress, final.name)
    consolidated = session.consolidator.begun()
    session.say("checkpoint")

    def seal() -> dict[str, float]:
        with discarded(aside):
            state = session.written_state("iteration", number, aside)
            name_checkpoint(aside, final, state.hashes)
        return {"checkpoint/gib": state.size / GIB, "time/checkpoint_write_s": state.seconds}

    def publish(figures: dict[str, float]) -> None:
        append_record(training, number, metrics | figures)  # before the manifest: a resume goes on after this line
        consolidated()
        write_manifest(run, reached)
        prune_checkpoints(run, training.config.checkpoint.keep, final.name, training.config.checkpoint.best)

    with timed(training, metrics, "checkpoint"):
        session.checkpoints.wait()
        aside = empty_beside(final)
        accompany(aside, run, reached)
        if not session.snapshots:
            session.call_all(dict.fromkeys(session.distinct_groups, Save(str(aside))), f"{number}/save")
            metrics |= seal()
    if session.snapshots:
        session.checkpoints.begin(("iteration", number), lambda: publish(seal()), get_run_logger().warning)
    else:
        publish({})


def snapshot(training: Training, progress: Progress) -> dict[str, float]:
    """Have the ranks copy their state at `progress` to memory of their hosts, while they generate the next responses.

    What else the training is at that moment stays in the session.
    """
    session, metrics = training.session(), dict[str, float]()
    with timed(training, metrics, "snapshot"):
        session.take_snapshot("iteration", progress.iteration)
    last = sorted(session.reached)[-1:]
    session.reached = {number: session.reached[number] for number in last} | {progress.iteration: progress}
    return metrics


@task(task_run_name="restore", cache_policy=NO_CACHE)
def restore(training: Training) -> Progress:
    """Bring the engines to the newest whole state, and forget what was made and recorded after it.

    That is a snapshot, where ranks were lost and their hosts have it; else the manifest's checkpoint, which is whole;
    and without any the beginning, at which the engines are once they are built.

    Raises:
        UserError: a file of the checkpoint names what no state needs.
    """
    training.session().checkpoints.settle()
    run, saved = training.run, read_manifest(training.run)
    progress, place = saved.progress, "its beginning"
    memory: Path | None = None  # folder with that of the sampler
    if (kept := newest_kept(training, saved)) is not None:
        progress, place, memory = kept, f"snapshot {kept.iteration:06d}", run.path
        load_snapshot(training, kept)
    elif saved.checkpoint is not None:
        place, memory = f"checkpoint {saved.checkpoint}", run.checkpoints / saved.checkpoint
        load_checkpoint(training, memory, progress)
    done = progress.iteration
    prune_checkpoints(run, training.config.checkpoint.keep, saved.checkpoint, training.config.checkpoint.best)
    if done < training.config.iterations:
        reopen(run)
    tokens = _generated_again(training, done)
    truncate_metrics(run, -1 if memory is None else done)
    restore_memory(training, memory, done)
    drop_lost_experience(run, done)
    recovered(training, place, tokens)
    training.session().keep_reserve()
    return progress


def newest_kept(training: Training, saved: Manifest) -> Progress | None:
    """Return the progress at the newest snapshot that a training goes on from; None: the manifest is newer.

    It was recorded, and if its iteration is to have a checkpoint, it has one: neither is made up for later.
    """
    config = training.config
    recorded = max((item["iteration"] for item in read_metrics(training.run)), default=0)
    if saved.progress.iteration < recorded and checkpoint_due(config, recorded):
        recorded -= 1
    kept = _newest_whole(training, recorded)
    return kept if kept is not None and kept.iteration >= saved.progress.iteration else None


def kept_at(training: Training, number: int) -> Progress | None:
    """Return the progress at the snapshot after iteration `number`; None: not every rank has it."""
    kept = _newest_whole(training, number)
    return kept if kept is not None and kept.iteration == number else None


def _newest_whole(training: Training, at_most: int) -> Progress | None:
    """Return the progress at the newest snapshot, up to an iteration, that every rank has finished."""
    session = training.session()
    try:
        number = session.newest_snapshot("iteration", at_most) if session.reached else None
    except HostFailed:
        return None  # who waits for its ranks next is told
    return None if number is None else session.reached.get(number)


def load_snapshot(training: Training, progress: Progress) -> None:
    """Bring every engine to a snapshot, which holds the state at `progress`."""
    session, done, version = training.session(), progress.iteration, progress.policy_version
    session.say("loading the snapshot")
    session.load_snapshot("iteration", done, version)
    if reshard_strategy(training.config) == "broadcast":
        bring_weights(session, f"{done}/load-reshard", version)


def load_checkpoint(training: Training, folder: Path, progress: Progress) -> None:
    """Bring every engine to a checkpoint, which holds the state at `progress`."""
    session, done, version = training.session(), progress.iteration, progress.policy_version
    session.say("loading the checkpoint", folder.name)
    session.call_all(dict.fromkeys(session.distinct_groups, Load(str(folder), version)), f"{done}/load")
    if reshard_strategy(training.config) == "broadcast":
        bring_weights(session, f"{done}/load-reshard", version)


def _generated_again(training: Training, done: int) -> int:
    """Return the tokens of recorded iterations after `done` whose responses are not taken over (rollout.py)."""
    following = training.run.experience(done + 1)
    taken_over = following.exists() and RESAMPLED not in column_names(following)
    records = (item for item in read_metrics(training.run) if item["iteration"] > done + taken_over)
    return sum(int(item["metrics"].get("rollout/tokens", 0)) for item in records)


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
