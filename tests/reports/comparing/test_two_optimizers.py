"""Two optimizers are compared as any two settings are: trainings of both with the same seeds, and `penstock compare`.

Real trainings on the CPU, short ones.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.configs.loading.load import load_config
from penstock.flows.train import train
from tests.processes import ROOT
from tests.training import SHORTEST

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SMALL = (*SHORTEST, "record.experiment=optimizers")


@pytest.mark.usefixtures("prefect_harness")
def test_two_optimizers_are_two_groups_that_differ_in_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed by seed, with the keys that only one of them has. Control: two seeds of one optimizer are one group."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("adamw", "sgd"):
        for seed in (0, 1):
            given = [*SMALL, f"actor.optimizer={{name: {name}, learning_rate: 1e-2}}", f"seed={seed}"]
            train(load_config(ROOT / "configs" / "quickstart.yaml", given), run_folder=str(tmp_path / f"{name}-{seed}"))
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["compare", "optimizers", "--folder", str(tmp_path)])
    assert done.exception is None, done.output
    (target,) = (tmp_path / "comparisons").iterdir()
    differences = pd.read_csv(target / "differences.csv", index_col="parameter", keep_default_na=False)
    own = {f"actor.optimizer.{key}" for key in ("name", "betas", "eps", "momentum")}
    assert set(differences.index) == own | {"seed"}
    assert differences.loc["actor.optimizer.name"].to_dict() == {
        "adamw-0": "adamw",
        "adamw-1": "adamw",
        "sgd-0": "sgd",
        "sgd-1": "sgd",
    }
    groups = pd.read_csv(target / "groups.csv", index_col="actor.optimizer.name")
    assert groups["completed"].to_dict() == {"adamw": 2, "sgd": 2}
    tests = pd.read_csv(target / "significance.csv")
    assert set(tests["test"]) == {"paired t-test, 2 seeds"}
    ends = {
        run: (tmp_path / run / "models" / "final" / "model.safetensors").read_bytes() for run in differences.columns
    }
    assert len(set(ends.values())) == 4
