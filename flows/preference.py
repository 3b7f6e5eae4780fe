"""Preference optimization of a policy (DPO, cDPO, IPO, ORPO, KTO): a flow of its own, before reinforcement learning."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.preference import PreferenceConfig
from state.run_folder import new_run_folder
from tasks.admission import admission
from tasks.preference import (
    begin_preferences,
    check_preferences,
    end_preferences,
    load_preferences,
    measure_heldout,
    preference_blocks,
    preference_steps,
    reference_pass,
    splits,
)
from tasks.preference_record import recording_preferences
from tasks.prepare import starting_model
from tasks.session import open_session, write_config


@flow(name="preference", flow_run_name="preference-{config.name}")
def preference(config: PreferenceConfig, run_folder: str | None = None) -> str:
    """Train the model of `config` on preferences; return the folder with the result."""
    check_preferences(config)
    run = new_run_folder(Path(config.folder), config.name, Path(run_folder) if run_folder else None)
    write_config(run, config)
    engines = config.engines()
    with (
        admission(engines),
        open_session(engines, run) as training,
        recording_preferences(training, config, config.loss.name),
    ):
        model = starting_model(training)
        counts = load_preferences(training, config, model)
        begin_preferences(training, config, model)
        for split in splits(config) if config.loss.needs_reference else ():
            reference_pass(training, config, split)
        if config.data.heldout is not None:
            measure_heldout(training, config, 0)
        for first, count in preference_blocks(config):
            preference_steps(training, config, counts["train"], first, count)
        if config.data.heldout is not None:
            measure_heldout(training, config, config.trainer.steps)
        return end_preferences(training, model)
