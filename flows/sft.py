"""Supervised training on prompt/response pairs: a flow of its own, and the warm-up inside `train`."""

from __future__ import annotations

from prefect import flow

from configs.schema import TrainConfig
from engines.commands.finetuning import SftEnd
from flows.recovery import despite_losses
from penstock.session.opening import SFT, opened, resume_of, started
from penstock.session.progress import show_progress
from penstock.session.session import Training
from penstock.state.manifest import ended
from tasks.finetuning.checkpoints import blocks, checkpoint_due, end_finetuning, finetuned, restored, save_step
from tasks.finetuning.record import record_steps, record_warm_up, recording_supervised
from tasks.finetuning.supervised import begin_supervised, supervised_steps
from tasks.start import load_pairs, starting_model


@flow(name="sft", flow_run_name="sft-{config.name}")
def sft(config: TrainConfig = TrainConfig(), run_folder: str | None = None, resume: str | None = None) -> str:  # noqa: B008
    """Train the model of `config` on its `sft` data alone; return the folder with the result.

    Args:
        config: the whole configuration; `base` may name a recipe that fills what is not given.
        run_folder: where to put the run; default: a new folder under `config.folder`.
        resume: folder of an earlier run to continue; its own configuration is used.
    """
    with opened(SFT, config, run_folder, resume_of(config, run_folder, resume)) as (config, run):
        if ended(run, "sft"):
            return str(run.model("sft"))
        with started(SFT, config, run) as training, show_progress(training), recording_supervised(training):
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
    target, config = training.run.model("sft"), training.config.sft
    assert config is not None
    if target.exists():
        return finetuned(training.run, "sft")
    pairs = load_pairs(training, model_folder)
    begin_supervised(training, model_folder)
    record, figures = (record_steps, training.run) if alone else (record_warm_up, training.run.warm_up)
    for first, count in blocks(config, restored(training, figures)):
        losses = supervised_steps(training, pairs, first, count)
        record(training, first, losses)
        if checkpoint_due(config, first + count):
            save_step(training, first + count)
    return end_finetuning(training, SftEnd, model_folder, "sft")
