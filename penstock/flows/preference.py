"""Preference optimization of a policy (DPO, cDPO, IPO, ORPO, KTO): a flow of its own, before reinforcement learning."""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.form import config_from_form
from penstock.configs.preference import PreferenceConfig
from penstock.flows.finetuning import train_on_preferences
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import PREFERENCE


@flow(name="preference", flow_run_name=run_name)
@ends_in_words
def preference(
    config: form.Advanced[PreferenceConfig] = None,
    recipe: form.RecipeFile = None,
    name: form.Name = None,
    model: form.Model = None,
    data: form.Data = None,
    steps: form.Steps = None,
    batch: form.Batch = None,
    learning_rate: form.LearningRate = None,
    seed: form.Seed = None,
    overrides: form.Overrides = None,
    run_folder: form.RunFolder = None,
    resume: form.ResumedRun = None,
    changes: form.Changes = None,
) -> str:
    """Train a model on preferences; return the folder with the result.

    A new run is of a recipe and what is given beside it, or of a whole `config`, as the command line gives it.
    """
    fields = {
        "name": name,
        "model.path": model,
        "data.train": data,
        "trainer.steps": steps,
        "trainer.batch": batch,
        "trainer.optimizer.learning_rate": learning_rate,
        "seed": seed,
    }
    config = config_from_form(PreferenceConfig, recipe, fields, overrides, config, resume)
    return train_on_preferences(PREFERENCE, config, run_folder, resume, changes)
