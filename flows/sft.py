"""Supervised training on prompt/response pairs: a flow of its own, and the warm-up inside `train`."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.loading import resolve
from configs.schema import TrainConfig
from state.run_folder import new_run_folder
from tasks.admission import admission
from tasks.check import check_supervised
from tasks.prepare import load_pairs, starting_model
from tasks.session import Training, open_session, write_config
from tasks.supervise import begin_supervised, blocks, end_supervised, supervised_steps


@flow(name="sft", flow_run_name="sft-{config.name}")
def sft(config: TrainConfig, run_folder: str | None = None) -> str:
    """Train the model of `config` on its `sft` data alone; return the folder with the result."""
    config = resolve(config)
    check_supervised(config)
    run = new_run_folder(Path(config.folder), f"{config.name}-sft", Path(run_folder) if run_folder else None)
    write_config(run, config)
    with admission(config), open_session(config, run) as training:
        return supervise(training, starting_model(training))


@flow(name="supervised-warm-up", flow_run_name="supervised-warm-up", validate_parameters=False)
def supervise(training: Training, model_folder: str) -> str:
    """Train the model in `model_folder` on the pairs; return the folder with the result. Done once per run."""
    target = training.run.model("sft")
    if target.exists():
        return str(target)
    load_pairs(training, model_folder)
    begin_supervised(training, model_folder)
    for first, count in blocks(training.config):
        supervised_steps(training, first, count)
    return end_supervised(training, model_folder, str(target))
