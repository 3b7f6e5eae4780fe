"""Training of a reward model on pairs (Bradley-Terry); `reward.model` of a training takes the result."""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.parameters import fields_of_steps, with_form
from penstock.configs.preference import RewardModelConfig
from penstock.flows.finetuning import train_on_preferences
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import REWARD_MODEL


@flow(name="reward-model", flow_run_name=run_name)
@ends_in_words
@with_form(RewardModelConfig, fields_of_steps("data.train", "trainer"))
def reward_model(
    config: RewardModelConfig,
    run_folder: form.RunFolder = None,
    resume: form.ResumedRun = None,
    changes: form.Changes = None,
) -> str:
    """Train a reward model that starts from a language model; return the folder with the result.

    A new run is of a recipe and what is given beside it, or of a whole `config`, as the command line gives it.
    """
    return train_on_preferences(REWARD_MODEL, config, run_folder, resume, changes)
