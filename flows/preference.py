"""Preference optimization of a policy (DPO, cDPO, IPO, ORPO, KTO): a flow of its own, before reinforcement learning."""

from __future__ import annotations

from prefect import flow

from configs.preference import PreferenceConfig
from flows.finetuning import train_on_preferences
from penstock.session.opening import PREFERENCE


@flow(name="preference", flow_run_name="preference-{config.name}")
def preference(
    config: PreferenceConfig = PreferenceConfig(),  # noqa: B008
    run_folder: str | None = None,
    resume: str | None = None,
) -> str:
    """Train the model of `config` on preferences; return the folder with the result.

    Args:
        config: the whole configuration; `base` may name a recipe that fills what is not given.
        run_folder: where to put the run; default: a new folder under `config.folder`.
        resume: folder of an earlier run to continue; its own configuration is used.
    """
    return train_on_preferences(PREFERENCE, config, run_folder, resume)
