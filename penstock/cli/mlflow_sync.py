"""`penstock mlflow-sync`: give MLflow what a run folder holds and MLflow does not, because its server was away.

A run that goes on delivers by itself, also what earlier attempts left; this is for one that has ended. Twice is once:
MLflow is asked what it holds. Left out: what is delivered, and how (penstock/trackers/mlflow_outbox.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import locked, open_run_folder
from penstock.trackers.mlflow import check_store, default_tracking_uri, holds_run, public_uri
from penstock.trackers.mlflow_outbox import Delivery


def sync(folder: Path) -> str:
    """Deliver what MLflow lacks of the run in `folder`; return what was done, for people.

    Raises:
        UserError: there is no run, it is being trained, it has no MLflow run, or MLflow does not answer or hold it.
    """
    run = open_run_folder(folder)
    uri = default_tracking_uri(run.path.parent)
    with locked(run):
        if (run_id := read_manifest(run).mlflow_run_id) is None:
            raise UserError(f"{folder} was never recorded in MLflow", "resume it, and it will be")
        check_store(uri)
        if not holds_run(uri, run_id):
            raise UserError(
                f"MLflow ({public_uri(uri)}) does not hold the run {run_id} that {folder} was recorded in",
                "set MLFLOW_TRACKING_URI as it was in the training",
            )
        delivery = Delivery(uri, run_id)
        delivery.everything(run)
    what = "now holds all of it" if delivery.sent else "held all of it already"
    return f"MLflow ({public_uri(uri)}) {what}"
