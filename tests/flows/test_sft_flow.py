"""Supervised training on its own: what it measures is on record, step by step, also over an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.configs.schema import TrainConfig
from penstock.flows import sft as module
from penstock.flows.sft import sft
from penstock.session.session import Training
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.mlflow import connect, default_tracking_uri

pytestmark = pytest.mark.slow

STEPS = 7
TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}


def test_every_step_is_recorded_once(prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk, in MLflow and in the summary: of an attempt that fails, of one that goes on, of the end alone."""
    trainer = {"steps": STEPS, "batch": 16, "checkpoint_every": 3, "optimizer": {"learning_rate": 3e-3}}
    config = TrainConfig.model_validate(
        {
            "model": TINY,
            "data": {"arithmetic": {"digits": 1, "sft": 32, "train": 8, "heldout": 8}},
            "sft": trainer,
            "record": {"experiment": "supervising"},
        }
    )
    run, steps = RunFolder(tmp_path / "run"), module.supervised_steps

    def failing(training: Training, pairs: int, first: int, count: int) -> list[float]:
        if first == 6:
            raise RuntimeError("no more")
        return steps(training, pairs, first, count)

    monkeypatch.setattr(module, "supervised_steps", failing)
    with pytest.raises(RuntimeError, match="no more"):
        sft(config, run_folder=str(run.path))
    failed = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (failed["status"], failed["steps"]) == ("failed", 6)
    with run.metrics.open("a", encoding="utf-8") as file:  # as if killed between a record and its checkpoint
        file.write(json.dumps({"iteration": STEPS, "metrics": {"loss": 9.0}}) + "\n")

    monkeypatch.setattr(module, "supervised_steps", steps)
    assert sft(resume=str(run.path)) == str(run.model("sft"))
    losses = [record["metrics"]["loss"] for record in read_metrics(run)]
    assert [record["iteration"] for record in read_metrics(run)] == list(range(1, STEPS + 1))
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert (summary["loss_first"], summary["loss_last"]) == (losses[0], losses[-1])
    assert losses[-1] < losses[0]
    assert summary["tracked"] == failed["tracked"]

    client = connect(default_tracking_uri(run.path.parent))
    logged = client.get_run(summary["tracked"][0]["run"])
    assert logged.info.status == "FINISHED"
    assert client.get_experiment(logged.info.experiment_id).name == "supervising"
    history = client.get_metric_history(summary["tracked"][0]["run"], "loss")
    assert [(entry.step, entry.value) for entry in history] == list(enumerate(losses, start=1))

    run.summary.unlink()  # as if killed in the end, when the model was written
    assert sft(resume=str(run.path)) == str(run.model("sft"))
    again = json.loads(run.summary.read_text(encoding="utf-8"))
    of_its_own = {"seconds": 0, "recomputed": 0, "prefect_flow_run_id": ""}
    assert again | of_its_own == summary | of_its_own
    assert client.get_metric_history(summary["tracked"][0]["run"], "loss") == history
    assert client.get_run(summary["tracked"][0]["run"]).info.status == "FINISHED"
