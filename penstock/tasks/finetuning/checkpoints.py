"""What offline trainings share (supervised, on preferences, of a reward model): blocks, checkpoints, the end.

Steps go to the ranks in blocks. Every `checkpoint_every` steps the ranks write their state into the folder
`finetuning` of the run, whose manifest counts steps; a resume goes on after them, and ends as if nothing had happened.
That of the last step stays: from it a run goes on for longer. A warm-up has none, and its folder is deleted.

Left out: the steps (penstock/tasks/finetuning/supervised.py, penstock/tasks/finetuning/preferences.py), checkpoints of
iterations (penstock/tasks/iteration/checkpoint.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.files import discard, discarded, empty_beside, filling
from penstock.base.model_code import Code, copy_code
from penstock.configs.sections.trainer import SftConfig
from penstock.engines.commands.checkpoint import Load, Save
from penstock.engines.commands.finetuning import ModelToTrain, PreferenceEnd, PreferenceSteps, SftEnd, SftSteps
from penstock.engines.commands.message import name_of
from penstock.session.events import recovered
from penstock.session.progress import step_shown
from penstock.session.record import elapsed
from penstock.session.session import Training
from penstock.state.manifest import (
    Progress,
    accompany,
    name_checkpoint,
    prune_checkpoints,
    read_manifest,
    read_progress,
    reopen,
    write_hashes,
    write_manifest,
)
from penstock.state.run_folder import RunFolder, truncate_metrics

STEPS_PER_COMMAND = 25  # often enough for progress and live learning rates, rare enough to cost nothing


def blocks(config: SftConfig, done: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first step, number of steps) of every command after `done` steps.

    Checkpoints, and changes of scheduled values, fall between two commands: one learning rate and one token budget hold
    for all steps of a command.
    """
    first = done
    schedules = [item for item in (config.optimizer.learning_rate, config.budget) if isinstance(item, dict)]
    changes = {step for schedule in schedules for step in schedule}
    while first < config.steps:
        ends = [first - first % every + every for every in (STEPS_PER_COMMAND, config.checkpoint_every) if every]
        ends += [step for step in changes if step > first]
        count = min(*ends, config.steps) - first
        yield first, count
        first += count


def model_to_train(training: Training, dtype: str, seed: int, model_folder: str) -> ModelToTrain:
    """Return what the ranks are told of the model to train, with what was decided for this machine."""
    session = training.session()
    trainer, model = session.engine_config()["sft"], session.config.model
    return ModelToTrain(
        model_folder,
        dtype,
        trainer,
        seed,
        session.keeps_logits("sft"),
        model.code,
        attention=model.attention,
        train_encoder=model.train_encoder,
    )


def taken(
    training: Training, steps: SftSteps | PreferenceSteps, name: str, first: int, count: int
) -> list[dict[str, float]]:
    """Have the ranks take `count` steps from step `first` on, and show each; return their figures.

    The log says which of them left the weights as they were.
    """
    shown = step_shown(training, first, count)
    figures = training.session().call("actor", steps, f"{first}/{name}", shown)[0].steps
    if skipped := sum(int(step["skipped_steps"]) for step in figures):
        message = "%d of the optimizer steps %d to %d skipped: the gradient is not finite (NaN or infinite)"
        get_run_logger().warning(message, skipped, first + 1, first + count)
    return figures


def checkpoint_due(config: SftConfig, done: int, alone: bool = True) -> bool:
    """Whether the state after `done` steps is to be saved.

    Args:
        alone: the run is of these steps alone and may go on after the last one; after a warm-up `train` goes on.
    """
    if not config.checkpoint_every or done >= config.steps:
        return bool(config.checkpoint_every) and alone
    return done % config.checkpoint_every == 0


@task(task_run_name="checkpoint-{step:06d}", cache_policy=NO_CACHE)
def save_step(training: Training, step: int) -> None:
    """Make the state after `step` durable; the one before it is deleted."""
    session, folder = training.session(), training.run.finetuning
    final = folder.checkpoint(step)
    session.checkpoints.wait()
    aside = empty_beside(final)
    saved = read_manifest(training.run)
    reached = replace(saved, progress=Progress(iteration=step), checkpoint=final.name)
    now = replace(saved, progress=saved.progress.advanced(seconds=elapsed(training)))
    accompany(aside, training.run, reached)
    if session.snapshots:
        session.take_snapshot("step", step)
    else:
        session.call("actor", Save(str(aside)), f"{step}/finetuning_save")

    def write() -> None:
        with discarded(aside):
            name_checkpoint(aside, final, session.written_state("step", step, aside).hashes)
        write_manifest(folder, reached)
        write_manifest(training.run, now)
        prune_checkpoints(folder, 1, final.name)

    if session.snapshots:
        session.checkpoints.begin(("step", step), write, get_run_logger().warning)
    else:
        write()


@task(task_run_name="restore", cache_policy=NO_CACHE)
def restored(training: Training, record: RunFolder, name: str) -> int:
    """Bring the ranks, which hold the starting model, to the run's checkpoint; return its step, 0 if it has none.

    Args:
        record: the folder with the figures of these steps; figures of later steps are dropped.
        name: of the model, under `models/`; one that is there is of fewer steps, and goes.
    """
    training.session().checkpoints.settle()
    folder = training.run.finetuning
    saved = read_progress(folder)
    reopen(training.run, name)
    prune_checkpoints(folder, 1, saved.checkpoint)
    truncate_metrics(record, saved.progress.iteration or -1)  # step 0 is the measurement before the first
    step = saved.progress.iteration if saved.checkpoint is not None else 0
    if saved.checkpoint is not None:
        load = Load(str(folder.checkpoints / saved.checkpoint), version=0)
        training.session().call("actor", load, f"{step}/finetuning_load")
    recovered(training, f"checkpoint {saved.checkpoint}" if saved.checkpoint else "its beginning")
    return step


def is_written(run: RunFolder, name: str, steps: int) -> bool:
    """Whether `models/<name>` is there and of all `steps`: its checkpoint tells of one that is of fewer."""
    saved = read_progress(run.finetuning)
    return run.model(name).exists() and (saved.checkpoint is None or saved.progress.iteration >= steps)


def steps_done(run: RunFolder, name: str, steps: int) -> int:
    """Return the step from which a resume of `run` goes on: all `steps` where `models/<name>` is written."""
    return steps if is_written(run, name, steps) else read_progress(run.finetuning).progress.iteration


@task(task_run_name="end", cache_policy=NO_CACHE)
def end_finetuning(
    training: Training, command: type[SftEnd | PreferenceEnd], model_folder: str, name: str, steps: int
) -> str:
    """Write the trained model with its tokenizer to `models/<name>`, complete or not at all, and free the engines."""
    training.session().checkpoints.wait()
    training.session().say("writing the trained model")
    final = training.run.model(name)
    with filling(final) as aside:
        training.session().call("actor", command(str(aside)), f"0/{name_of(command)}")
        copy_tokenizer(Path(model_folder), aside, training.session().config.model.code)
        write_hashes(aside)
    return finetuned(training.run, name, steps)


def finetuned(run: RunFolder, name: str, steps: int) -> str:
    """Return the folder of a model that is written; a checkpoint on the way to it has served and is deleted."""
    if read_progress(run.finetuning).progress.iteration < steps:
        discard(run.finetuning.path)
    return str(run.model(name))


def copy_tokenizer(source: Path, target: Path, code: Code | None) -> None:
    """Copy what a model folder has of its tokenizer and image processor, and the `code` that it is trusted to bring."""
    for pattern in (
        "tokenizer*",
        "special_tokens_map.json",
        "vocab*",
        "merges.txt",
        "chat_template*",
        "added_tokens.json",
        "*processor_config.json",
    ):
        for path in source.glob(pattern):
            shutil.copy2(path, target / path.name)
    copy_code(source, target, code)
