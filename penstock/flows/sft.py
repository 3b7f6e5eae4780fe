"""Supervised training on prompt/response pairs: a flow of its own, and the warm-up inside `train`."""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.parameters import fields_of_steps, with_form
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.finetuning import SftEnd
from penstock.flows.parts.recovery import despite_losses
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import SFT, left_as_it_is, opened, resume_of, started
from penstock.session.progress import show_progress, show_steps
from penstock.session.session import Training
from penstock.tasks.finetuning.checkpoints import (
    blocks,
    checkpoint_due,
    end_finetuning,
    finetuned,
    is_written,
    restored,
    save_step,
)
from penstock.tasks.finetuning.record import record_steps, record_warm_up, recording_supervised
from penstock.tasks.finetuning.supervised import begin_supervised, supervised_steps
from penstock.tasks.start import load_pairs, starting_model


@flow(name="sft", flow_run_name=run_name)
@ends_in_words
@with_form(TrainConfig, fields_of_steps("data.sft", "sft"))
def sft(
    config: TrainConfig,
    run_folder: form.RunFolder = None,
    resume: form.ResumedRun = None,
    changes: form.Changes = None,
) -> str:
    """Train a model on the data of a recipe's `sft` section alone; return the folder with the result.

    A new run is of a recipe and what is given beside it, or of a whole `config`, as the command line gives it.
    """
    going_on = resume_of(config, run_folder, resume, changes=changes)
    if done := left_as_it_is(SFT, going_on):
        return str(done.model("sft"))
    with (
        opened(SFT, config, run_folder, going_on) as (config, run),
        started(SFT, config, run) as training,
        show_progress(training),
        recording_supervised(training),
    ):
        return despite_losses(training, supervised)


def supervised(training: Training) -> str:
    """Take the steps that are left, from the model as it starts; return the folder with the result."""
    return supervise(training, starting_model(training), alone=True)


@flow(name="supervised-warm-up", flow_run_name="supervised-warm-up", validate_parameters=False)
def supervise(training: Training, model_folder: str, alone: bool = False) -> str:
    """Train the model in `model_folder` on the pairs; return the folder with the result. Done once per run.

    Args:
        alone: whether the run is of these steps alone; in `train` its record is of iterations.
    """
    config = training.config.sft
    assert config is not None
    if is_written(training.run, "sft", config.steps):
        return finetuned(training.run, "sft", config.steps)
    pairs = load_pairs(training, model_folder)
    begin_supervised(training, model_folder)
    record, figures = (record_steps, training.run) if alone else (record_warm_up, training.run.warm_up)
    done = restored(training, figures, "sft")
    show_steps(training, config.steps, done, "training" if alone else "warm-up")
    for first, count in blocks(config, done):
        record(training, first, supervised_steps(training, pairs, first, count))
        if checkpoint_due(config, first + count, alone):
            save_step(training, first + count)
    return end_finetuning(training, SftEnd, model_folder, "sft", config.steps)
