"""Training of a reward model on pairs (Bradley-Terry); `reward.model` of a training takes the result."""

from __future__ import annotations

from prefect import flow

from configs.preference import RewardModelConfig
from flows.finetuning import train_on_preferences
from penstock.session.opening import REWARD_MODEL


@flow(name="reward-model", flow_run_name="reward-model-{config.name}")
def reward_model(
    config: RewardModelConfig = RewardModelConfig(),  # noqa: B008
    run_folder: str | None = None,
    resume: str | None = None,
) -> str:
    """Train a reward model that starts from the language model of `config`; return the folder with the result.

    Args:
        config: the whole configuration; `base` may name a recipe that fills what is not given.
        run_folder: where to put the run; default: a new folder under `config.folder`.
        resume: folder of an earlier run to continue; its own configuration is used.
    """
    return train_on_preferences(REWARD_MODEL, config, run_folder, resume)
