"""Training of a reward model on pairs (Bradley-Terry); `reward.model` of a training takes the result."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.preference import RewardModelConfig
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
)
from tasks.preference_record import recording_preferences
from tasks.prepare import starting_model
from tasks.session import open_session, write_config


@flow(name="reward-model", flow_run_name="reward-model-{config.name}")
def reward_model(config: RewardModelConfig, run_folder: str | None = None) -> str:
    """Train a reward model that starts from the language model of `config`; return the folder with the result."""
    check_preferences(config)
    run = new_run_folder(Path(config.folder), config.name, Path(run_folder) if run_folder else None)
    write_config(run, config)
    engines = config.engines()
    with (
        admission(engines),
        open_session(engines, run) as training,
        recording_preferences(training, config, "bradley_terry"),
    ):
        model = starting_model(training)
        counts = load_preferences(training, config, model)
        begin_preferences(training, config, model)
        if config.data.heldout is not None:
            measure_heldout(training, config, 0)
        for first, count in preference_blocks(config):
            preference_steps(training, config, counts["train"], first, count)
        if config.data.heldout is not None:
            measure_heldout(training, config, config.trainer.steps)
        return end_preferences(training, model)
