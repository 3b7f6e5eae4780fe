"""Invariants of the MLflow run of a training, on a real store: each iteration once, any length of run, any number."""

from __future__ import annotations

import base64
import json
import logging
import math
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from penstock.base.errors import UserError
from penstock.trackers import mlflow as mlflow_run
from penstock.trackers.mlflow import connect

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return mlflow_run.default_tracking_uri(tmp_path_factory.mktemp("store") / "runs")


def _open(uri: str, params: dict[str, str] | None = None) -> str:
    return mlflow_run.open_run(uri, "exp", "tiny-1", {"prefect.flow_run_id": "f-1"}, params or {})


def test_a_run_keeps_its_name_tags_params_and_metrics(uri: str) -> None:
    """What goes in comes out, with more params than one call takes and a value longer than MLflow keeps."""
    params = {f"section.key{number}": str(number) for number in range(130)} | {"long": "x" * 7000}
    run_id = _open(uri, params)
    mlflow_run.log_iteration(uri, run_id, 1, {"reward/mean": 0.25, "reward/format_mean": 1.0})
    run = connect(uri).get_run(run_id)
    assert run.info.run_name == "tiny-1"
    assert run.data.tags["prefect.flow_run_id"] == "f-1"
    assert len(run.data.params) == 131
    assert run.data.params["section.key129"] == "129"
    assert len(run.data.params["long"]) == 6000
    assert run.data.metrics == {"reward/mean": 0.25, "reward/format_mean": 1.0, "iteration": 1.0}


def test_artifacts_lie_beside_the_database_and_not_in_the_working_directory(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run started from anywhere leaves nothing there: files and folders land in `mlartifacts` of the runs folder."""
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "report"
    elsewhere.mkdir()
    source.mkdir()
    (source / "index.html").write_text("<p>")
    (tmp_path / "config.yaml").write_text("a: 1")
    monkeypatch.chdir(elsewhere)
    run_id = _open(uri)
    mlflow_run.log_artifacts(uri, run_id, source, "report")
    mlflow_run.log_artifacts(uri, run_id, [tmp_path / "config.yaml"])
    store = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / run_id / "artifacts"
    assert (store / "report" / "index.html").read_text() == "<p>"
    assert (store / "config.yaml").read_text() == "a: 1"
    assert not list(elsewhere.iterdir())


def test_a_resumed_run_holds_each_iteration_once(uri: str) -> None:
    """A flow that asks what is logged and goes on from there leaves one point per iteration."""
    run_id = _open(uri)
    assert mlflow_run.logged_through(uri, run_id) == -1
    for iteration in (0, 1, 2):
        mlflow_run.log_iteration(uri, run_id, iteration, {"reward/mean": iteration / 10})
    mlflow_run.close_run(uri, run_id, "KILLED")
    mlflow_run.resume_run(uri, run_id)
    assert connect(uri).get_run(run_id).info.status == "RUNNING"
    done = mlflow_run.logged_through(uri, run_id)
    assert done == 2
    for iteration in (1, 2, 3):  # the checkpoint was older than the log: 1 and 2 are redone
        if iteration > done:
            mlflow_run.log_iteration(uri, run_id, iteration, {"reward/mean": iteration / 10})
    history = connect(uri).get_metric_history(run_id, "reward/mean")
    assert [point.step for point in history] == [0, 1, 2, 3]


def test_figures_of_an_iteration_are_told_from_the_iteration(uri: str) -> None:
    """They can be asked for by name and step, and do not count as the iteration being there."""
    run_id = _open(uri)
    figures = {"checkpoint/gib": 1.5, "time/checkpoint_s": 2.0}
    assert mlflow_run.steps_of(uri, run_id, "checkpoint/gib") == set()
    mlflow_run.log_figures(uri, run_id, 4, figures)
    assert mlflow_run.steps_of(uri, run_id, "checkpoint/gib") == {4}
    assert mlflow_run.steps_of(uri, run_id, "another") == set()
    assert mlflow_run.logged_through(uri, run_id) == -1


AT_THE_SAME_MOMENT = """
import sys
from penstock.trackers import mlflow as mlflow_run
from mlflow import MlflowClient
import sqlalchemy, alembic.command  # what takes long is done before both begin
found = MlflowClient.get_experiment_by_name
waits = []
def find(client, name):  # both processes look before either creates
    experiment = found(client, name)
    if not waits:
        waits.append(True)
        sys.stdout.write("looked\\n"); sys.stdout.flush(); sys.stdin.readline()
    return experiment
MlflowClient.get_experiment_by_name = find
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
print(mlflow_run.open_run(sys.argv[1], "shared", sys.argv[2], {}, {"seed": sys.argv[2]}))
"""


def test_two_first_trainings_at_the_same_moment_share_one_experiment(tmp_path: Path) -> None:
    """On a folder without a database: one of them makes it, and both look for the experiment before it is there."""
    uri = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    command = [sys.executable, "-c", AT_THE_SAME_MOMENT, uri]
    both = [
        subprocess.Popen([*command, name], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("1", "2")
    ]
    for moment in ("ready", "looked"):
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == moment
        for process in both:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
    runs = [process.communicate(timeout=60)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    found = [connect(uri).get_run(run) for run in runs]
    assert found[0].info.experiment_id == found[1].info.experiment_id
    assert {run.data.params["seed"] for run in found} == {"1", "2"}


def test_logging_an_iteration_twice_does_leave_two_points(uri: str) -> None:
    """Negative control of the test above: without asking `logged_through`, MLflow keeps both."""
    run_id = _open(uri)
    for value in (0.1, 0.2):
        mlflow_run.log_iteration(uri, run_id, 1, {"reward/mean": value})
    assert len(connect(uri).get_metric_history(run_id, "reward/mean")) == 2


@pytest.mark.parametrize("part", ["pass@1", "len(tokens)", "json, valid", "../x", "a//b", "é" * 300])
def test_a_part_of_a_reward_may_have_any_name(uri: str, part: str) -> None:
    """It is found again by its own name. Control: MLflow refuses it as it is."""
    run_id, name = _open(uri), f"reward/{part}_mean"
    with pytest.raises(MlflowException):
        connect(uri).log_metric(run_id, name, 1.0)
    mlflow_run.log_iteration(uri, run_id, 3, {name: 0.5})
    assert mlflow_run.steps_of(uri, run_id, name) == {3}


def test_numbers_that_are_not_finite_become_gaps(uri: str) -> None:
    """A diverged iteration is logged, its infinity not as 1.8e308, and the next one still is."""
    run_id = _open(uri)
    mlflow_run.log_iteration(uri, run_id, 1, {"actor/loss": math.nan, "actor/kl": math.inf, "reward/mean": 0.5})
    mlflow_run.log_iteration(uri, run_id, 2, {"actor/loss": 0.1, "actor/kl": 0.2, "reward/mean": 0.5})
    kl = [point.value for point in connect(uri).get_metric_history(run_id, "actor/kl")]
    assert math.isnan(kl[0])
    assert kl[1] == 0.2
    assert mlflow_run.logged_through(uri, run_id) == 2


def test_samples_are_a_table_that_mlflow_loads(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own reader finds the rows, and an iteration that is redone replaces its table."""
    run_id = _open(uri)
    for response in ("first", "<b>second</b>"):
        rows: list[dict[str, Any]] = [
            {"prompt": "2+2?", "response": response, "reward": 1.0},
            {"prompt": "ß", "response": "", "reward": 0.0},
        ]
        mlflow_run.log_samples(uri, run_id, 12, mlflow_run.table_of(rows))
    experiment = connect(uri).get_run(run_id).info.experiment_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # MLflow's reader searches the runs of the store in force
    table = connect(uri).load_table(experiment, "samples/000012.json", run_ids=[run_id])
    assert list(table.columns) == ["prompt", "response", "reward"]
    assert list(table["response"]) == ["<b>second</b>", ""]
    assert table["prompt"][1] == "ß"


def test_more_tables_than_mlflow_lists_do_not_end_the_run(uri: str) -> None:
    """The list of tables never outgrows its tag (8000 characters, about 160 tables) and keeps the newest."""
    run_id = _open(uri)
    connect(uri).set_tag(
        run_id,
        "mlflow.loggedArtifacts",
        json.dumps([{"path": f"samples/{number:06d}.json", "type": "table"} for number in range(100)]),
    )
    mlflow_run.log_samples(uri, run_id, 100, mlflow_run.table_of([{"prompt": "p", "response": "r", "reward": 0.0}]))
    listed = json.loads(connect(uri).get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert len(listed) == 100
    assert listed[-1]["path"] == "samples/000100.json"
    assert {"path": "samples/000000.json", "type": "table"} not in listed


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_closed_run_has_its_status(uri: str, status: mlflow_run.RunStatus) -> None:
    """The status that the flow ends with is the one that MLflow shows."""
    run_id = _open(uri)
    assert connect(uri).get_run(run_id).info.status == "RUNNING"
    mlflow_run.close_run(uri, run_id, status)
    assert connect(uri).get_run(run_id).info.status == status


def test_a_deleted_experiment_is_the_users_to_restore(uri: str) -> None:
    """MLflow keeps the name of a deleted experiment: the error says how to get it back."""
    experiment = connect(uri).create_experiment("binned")
    connect(uri).delete_experiment(experiment)
    with pytest.raises(UserError, match=f"mlflow experiments restore -x {experiment}"):
        mlflow_run.open_run(uri, "binned", "r", {}, {})


def test_making_a_database_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The terminal belongs to the training. Negative control: MLflow by itself tells of its tables."""
    connect(f"sqlite:///{tmp_path / 'silent.db'}").search_experiments()
    assert capsys.readouterr().err == ""
    with caplog.at_level(logging.INFO, "mlflow.store.db.utils"):
        MlflowClient(f"sqlite:///{tmp_path / 'loud.db'}").search_experiments()
    assert "Creating initial MLflow database tables" in capsys.readouterr().err


def test_the_environment_decides_the_store_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_URI wins; without it the database lies in the runs folder, by its absolute path."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert mlflow_run.default_tracking_uri(tmp_path) == "http://127.0.0.1:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    assert mlflow_run.default_tracking_uri(Path("runs")) == f"sqlite:///{tmp_path.resolve()}/runs/mlflow.db"


def test_a_run_has_a_page(uri: str) -> None:
    """The link names the experiment and the run, at the local server for a database."""
    run_id = _open(uri)
    experiment = connect(uri).get_run(run_id).info.experiment_id
    path = f"/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"
    assert mlflow_run.run_url(uri, run_id) == f"http://127.0.0.1:5000{path}"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://alice:s3cret@mlflow.corp:5000/base", "https://mlflow.corp:5000/base"),
        ("postgresql://alice:p%40ss@db/mlflow", "postgresql://db/mlflow"),
        ("https://mlflow.corp/a@b", "https://mlflow.corp/a@b"),
        ("sqlite:////data/a@b/mlflow.db", "sqlite:////data/a@b/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    """It stands in reports, artifacts and logs. Controls: addresses without one stay as they are."""
    assert mlflow_run.public_uri(address) == shown


def test_a_page_of_a_server_with_a_password_is_named_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report and two artifacts in Prefect link to it."""
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="7"))
    monkeypatch.setattr(mlflow_run, "connect", lambda _: SimpleNamespace(get_run=lambda _: run))
    url = mlflow_run.run_url("https://alice:s3cret@mlflow.corp", "abc")
    assert url.startswith("https://mlflow.corp/#/experiments/7/runs/abc")


def test_a_password_reaches_the_server_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's errors quote the address, in Prefect's states too. Control: the server sees name and password."""
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")  # taken back after the test
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    seen: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        address = f"http://alice:s%40same@127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(MlflowException) as refused:
            connect(address).get_run("abc")
        thread.join()
    with pytest.raises(MlflowException) as unreached:
        connect(address).get_run("abc")
    assert seen == [f"Basic {base64.b64encode(b'alice:s@same').decode()}"]
    for said in (str(refused.value), str(unreached.value)):
        assert "127.0.0.1" in said or "401" in said
        assert "same" not in said


def test_flatten_gives_dotted_keys_and_keeps_schedules_whole() -> None:
    """Every leaf is one param; a schedule by iteration is a value, not a section."""
    config = {"name": "a", "actor": {"optimizer": {"learning_rate": {0: 1e-6, 100: 1e-7}, "betas": [0.9, 0.95]}}}
    assert mlflow_run.flatten(config | {"critic": None, "groups": {}, "engine": {"eager": True}}) == {
        "name": "a",
        "actor.optimizer.learning_rate": '{"0": 1e-06, "100": 1e-07}',
        "actor.optimizer.betas": "[0.9, 0.95]",
        "critic": "null",
        "groups": "{}",
        "engine.eager": "true",
    }


def test_a_resumed_run_is_tagged_with_the_keys_that_changed(uri: str) -> None:
    """Its parameters stay, as MLflow wants. Control: with the same configuration there is no tag."""
    params = mlflow_run.flatten({"iterations": 2, "reward": {"timeout_s": 10.0}})
    run = mlflow_run.open_run(uri, "e", "run", {}, params)
    assert not mlflow_run.tag_changes(uri, run, params)
    changed = mlflow_run.flatten({"iterations": 3, "reward": {"timeout_s": 10.0}})
    assert mlflow_run.tag_changes(uri, run, changed)
    found = mlflow_run.connect(uri).get_run(run).data
    assert found.tags[mlflow_run.CHANGED] == "iterations=3"
    assert found.params["iterations"] == "2"
