"""The configuration with which a run goes on: its own, with what may change from now on (configs/resuming.py).

Left out: whether it can go on at all (state/manifest.py), and the going on (flows/train.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError
from configs.resuming import resumed_config
from configs.schema import TrainConfig
from state.manifest import check_kind, ended, read_manifest
from state.run_folder import open_run_folder
from tasks.session import read_config, write_config


def config_of(folder: Path, overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration of a run, with what is to change in it from now on.

    Raises:
        UserError: it is no run of `train`, an override cannot change, or nothing is there to go on from.
    """
    run = open_run_folder(folder)
    check_kind(run, "train")
    config = read_config(run)
    if not overrides:
        return config
    saved = read_manifest(run)
    if saved.checkpoint is None and ended(run):
        raise UserError(f"{folder} is complete and has no checkpoint to go on from", "start a new run")
    return resumed_config(config, overrides, saved.progress.iteration)


def keep(config: TrainConfig, folder: Path) -> None:
    """Write what has changed into the run folder: the flow, this one and those to come, reads it there."""
    run = open_run_folder(folder)
    if config != read_config(run):
        write_config(run, config)
