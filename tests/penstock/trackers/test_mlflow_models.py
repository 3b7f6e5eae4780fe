"""An exported model is a model of its run in MLflow, and its weights stay where they are."""

from __future__ import annotations

from pathlib import Path

from penstock.trackers.mlflow import connect, default_tracking_uri, open_run
from penstock.trackers.mlflow_models import register_folder


def test_a_model_points_at_its_folder_and_copies_nothing(tmp_path: Path) -> None:
    """Ready, in the run's experiment, under a name that MLflow takes; a store without the run gets nothing."""
    uri, folder = default_tracking_uri(tmp_path / "runs"), tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"0" * 5000)
    run_id = open_run(uri, "exp", "tiny", {}, {})
    model_id = register_folder(uri, run_id, "sums/v1.5: best", folder, {"seed": "3"})
    client = connect(uri)
    model = client.get_logged_model(str(model_id))
    assert (model.name, model.status, model.source_run_id) == ("sums-v1-5-best", "READY", run_id)
    assert model.tags["penstock.folder"] == str(folder)
    assert model.params == {"seed": "3"}
    assert [item.model_id for item in client.search_logged_models([model.experiment_id])] == [model_id]
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.parent != folder]
    assert register_folder(uri, "0" * 32, "tiny", folder, {}) is None
