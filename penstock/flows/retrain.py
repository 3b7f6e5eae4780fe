"""Retrain: train on from the newest version of a registered model where there are new data, and promote what is better.

    newest data -> nothing new: end
                -> train, from `latest` -> compare with `best` on the same held-out prompts -> promote, or not

For a schedule or a trigger (docs/retraining.md). The training is the flow `train` as a child: it waits for its GPUs,
and its child flows and record are those of any other.
"""

from __future__ import annotations

from prefect import State, flow
from prefect.states import Completed

from penstock.configs.loading import fields as form
from penstock.configs.loading.form import config_from_form
from penstock.configs.schema import TrainConfig
from penstock.flows.train import train
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.tasks.retraining.newest_data import newest_data
from penstock.tasks.retraining.next_training import next_training
from penstock.tasks.retraining.promote import promote


@flow(name="retrain", flow_run_name=run_name)
@ends_in_words
def retrain(
    data: form.NewestData,
    registered_model: form.RegisteredModel,
    config: form.Advanced[TrainConfig] = None,
    recipe: form.RecipeFile = None,
    name: form.Name = None,
    model: form.FirstModel = None,
    iterations: form.Iterations = None,
    overrides: form.Overrides = None,
) -> State[str]:
    """Retrain a registered model on the newest data; the message of the state says what has come of it.

    Its newest version takes the place of `model` once there is one, and the newest file that of the recipe's data.
    """
    fields = {
        "name": name,
        "model.path": model,
        "iterations": iterations,
        "record.registered_model": registered_model,
    }
    config = config_from_form(TrainConfig, recipe, fields, overrides, config)
    newest = newest_data(data, config)
    if newest.learnt_by is not None:
        return Completed(message=f"nothing new: {newest.learnt_by} has learnt from {newest.path}")
    run = train(config=next_training(config, newest))
    return Completed(message=promote(run), data=run)
