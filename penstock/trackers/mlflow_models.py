"""An exported model in MLflow, by reference: a logged model whose tag says in which folder its weights lie.

A logged model is MLflow's entity for a model of a run; one that is marked as external has no artifacts. Why not a
registered version with the folder as its source: a tracking server refuses local folders there. Left out: stages,
aliases, and copies of weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from penstock.trackers.mlflow import connect

FOLDER_TAG = "penstock.folder"


def register_folder(tracking_uri: str, run_id: str, name: str, folder: Path, params: Mapping[str, str]) -> str | None:
    """Add a model to a run and return its id; None if the store does not know the run (a copied run folder)."""
    from mlflow import MlflowException
    from mlflow.entities import LoggedModelStatus
    from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

    client = connect(tracking_uri)
    try:
        experiment = client.get_run(run_id).info.experiment_id
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    model = client.create_logged_model(
        experiment,
        name=re.sub(r"[^\w-]+", "-", name),  # MLflow refuses slashes, colons, dots, quotes and per cent signs
        source_run_id=run_id,
        tags={FOLDER_TAG: str(folder), MLFLOW_MODEL_IS_EXTERNAL: "true"},
        params=dict(params),
        model_type="causal-lm",
    )
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return str(model.model_id)
