"""Preference optimization of a policy (DPO, cDPO, IPO, ORPO, KTO): a flow of its own, before reinforcement learning."""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.parameters import fields_of_steps, with_form
from penstock.configs.preference import PreferenceConfig
from penstock.flows.finetuning import train_on_preferences
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import PREFERENCE


@flow(name="preference", flow_run_name=run_name)
@ends_in_words
@with_form(PreferenceConfig, fields_of_steps("data.train", "trainer"))
def preference(
    config: PreferenceConfig,
    run_folder: form.RunFolder = None,
    resume: form.ResumedRun = None,
    changes: form.Changes = None,
) -> str:
    """Train a model on preferences; return the folder with the result.

    A new run is of a recipe and what is given beside it, or of a whole `config`, as the command line gives it.
    """
    return train_on_preferences(PREFERENCE, config, run_folder, resume, changes)
