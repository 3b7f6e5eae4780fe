"""The comparison as it is used: a flow with artifacts, and a command; both write the same files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from typer.testing import CliRunner

from penstock.base.errors import UserError
from penstock.cli.app import app
from penstock.flows.compare import compare
from penstock.session.flow_runs.page import without_files
from penstock.tasks.evaluation.results import FIGURES, record_in_tracker
from penstock.trackers.mlflow import default_tracking_uri
from tests.delivering import begun, log_iteration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs whose database holds two runs; the second has no held-out accuracy."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = default_tracking_uri(tmp_path)
    for name, rate in (("slow", "1e-06"), ("fast", "3e-06")):
        tracker = begun(uri, name, "my experiment")
        tracker.configure({"actor.lr": rate, "seed": "0"})
        metrics = {"reward/mean": 0.5} | ({"heldout/accuracy": 0.25} if name == "slow" else {})
        log_iteration(tracker, 1, metrics)
        tracker.close("completed", time.time())
    return tmp_path


def artifact(key: str) -> str:
    """Return the data of the newest artifact under `key`."""
    with get_client(sync_client=True) as client:
        return str(client.request("GET", "/artifacts/{key}/latest", path_params={"key": key}).json()["data"])


@pytest.mark.usefixtures("prefect_harness")
def test_the_flow_writes_files_and_shows_the_table(folder: Path) -> None:
    """Both runs and the one parameter that differs are in the files and in the artifacts; the equal one is not."""
    target = Path(compare("my experiment", folder=str(folder)))
    assert target.parent == folder / "comparisons"
    assert target.name.startswith("my-experiment-")
    page = (target / "compare.md").read_text(encoding="utf-8")
    assert "3e-06" in page
    assert "seed" not in page
    assert (target / "compare.png").is_file()
    assert "](compare.png)" in page
    assert artifact("comparison-report") == without_files(page) != page  # Prefect's page has no picture beside it
    table = artifact("comparison")
    assert '"slow"' in table
    assert '"fast"' in table
    assert "NaN" not in table


@pytest.mark.usefixtures("prefect_harness")
def test_the_flow_takes_some_runs_and_refuses_others(folder: Path) -> None:
    """A run by name is compared alone; one that does not exist fails the flow with the names that do."""
    target = Path(compare("my experiment", ["slow"], str(folder)))
    assert "fast" not in (target / "compare.md").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="slow, fast"):
        compare("my experiment", ["medium"], str(folder))


def test_the_command_prints_the_table_and_where_the_files_are(folder: Path) -> None:
    """Without any server: results, differences and the folder on the terminal."""
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["compare", "my experiment", "--folder", str(folder)])
    assert done.exception is None
    for text in ("slow", "fast", "actor.lr = 3e-06", "0.250", str(folder / "comparisons")):
        assert text in done.output


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not"])
def test_an_evaluation_stands_beside_the_trainings(folder: Path, recorded: bool) -> None:
    """With its figures, as `penstock evaluate` records it. Control: without it its name and figure are not there."""
    results = folder / "evaluations" / "slow-20260115"
    (results / "base").mkdir(parents=True)
    (results / "base" / FIGURES).write_text(json.dumps({"heldout/accuracy": 0.75}), encoding="utf-8")
    for name in ("evaluation.md", "evaluation.json"):
        (results / name).write_text("{}", encoding="utf-8")
    record = {"tracker": "mlflow", "experiment": "my experiment", "parent": str(folder)}
    if recorded:
        record_in_tracker.fn(str(results), {"model": "base", "iteration": 0}, record, {})
    done = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["compare", "my experiment", "--folder", str(folder)])
    assert done.exception is None
    assert ("slow-20260115-base" in done.output, "0.750" in done.output) == (recorded, recorded)


def test_a_folder_without_runs_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped folder is an error and gets no database of its own, which MLflow would make."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = CliRunner().invoke(app, ["compare", "my experiment", "--folder", str(tmp_path / "rnus")])
    assert isinstance(done.exception, UserError)
    assert not (tmp_path / "rnus").exists()
