"""Training of a reward model on pairs (Bradley-Terry); `reward.model` of a training takes the result."""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.form import config_from_form
from penstock.configs.preference import RewardModelConfig
from penstock.flows.finetuning import train_on_preferences
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import REWARD_MODEL


@flow(name="reward-model", flow_run_name=run_name)
@ends_in_words
def reward_model(
    config: form.Advanced[RewardModelConfig] = None,
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
    """Train a reward model that starts from a language model; return the folder with the result.

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
    config = config_from_form(RewardModelConfig, recipe, fields, overrides, config, resume)
    return train_on_preferences(REWARD_MODEL, config, run_folder, resume, changes)
