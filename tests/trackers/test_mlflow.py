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
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_batch_log_limits

from penstock.base.errors import UserError
from penstock.trackers import mlflow as module
from penstock.trackers.mlflow import CHANGED, FOLDER, MlflowTracker, connect, default_tracking_uri, pages
from penstock.trackers.tracker import (
    ITERATION,
    PARENT,
    Artifact,
    Figures,
    Model,
    NewRun,
    Status,
    Table,
    flatten,
    table_text,
)
from tests.delivering import begun

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return default_tracking_uri(tmp_path_factory.mktemp("store") / "runs")


def _open(uri: str) -> MlflowTracker:
    tracker = MlflowTracker(uri)
    tracker.open(NewRun("tiny-1", "exp", {"prefect.flow_run_id": "f-1"}))
    return tracker


def _iteration(number: int, values: dict[str, float]) -> list[Figures]:
    return [Figures(number, {**values, ITERATION: float(number)})]


def _history(tracker: MlflowTracker, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in connect(tracker.uri).get_metric_history(tracker.run, name)]


def test_a_run_keeps_its_name_tags_params_and_metrics(uri: str) -> None:
    """What goes in comes out, with more params than one call takes and a value longer than MLflow keeps."""
    params = {f"section.key{number}": str(number) for number in range(130)} | {"long": "x" * 7000}
    tracker = _open(uri)
    assert tracker.configure(params)
    tracker.log(_iteration(1, {"reward/mean": 0.25, "reward/format_mean": 1.0}))
    run = connect(uri).get_run(tracker.run)
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
    tracker = _open(uri)
    tracker.artifact(Artifact("report", source))
    tracker.artifact(Artifact("config.yaml", tmp_path / "config.yaml"))
    tracker.artifact(Artifact("summary.json", "{}"))
    store = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / tracker.run / "artifacts"
    assert (store / "report" / "index.html").read_text() == "<p>"
    assert (store / "config.yaml").read_text() == "a: 1"
    assert (store / "summary.json").read_text() == "{}"
    assert not list(elsewhere.iterdir())


def test_a_resumed_run_holds_each_iteration_once(uri: str) -> None:
    """A flow that asks what is logged and goes on from there leaves one point per iteration."""
    first = _open(uri)
    assert first.logged_through() == -1
    for iteration in (0, 1, 2):
        first.log(_iteration(iteration, {"reward/mean": iteration / 10}))
    first.close("cancelled", 1e9)
    tracker = MlflowTracker(uri)
    assert tracker.find(first.run)
    assert tracker.status() == "cancelled"
    tracker.resume()
    assert tracker.status() is None
    assert connect(uri).get_run(tracker.run).info.status == "RUNNING"
    done = tracker.logged_through()
    assert done == 2
    for iteration in (1, 2, 3):  # the checkpoint was older than the log: 1 and 2 are redone
        if iteration > done:
            tracker.log(_iteration(iteration, {"reward/mean": iteration / 10}))
    assert [step for step, _ in _history(tracker, "reward/mean")] == [0, 1, 2, 3]


def test_figures_of_an_iteration_are_told_from_the_iteration(uri: str) -> None:
    """They can be asked for by name and step, and do not count as the iteration being there."""
    tracker = _open(uri)
    assert tracker.logged("checkpoint/gib") == set()
    tracker.log([Figures(4, {"checkpoint/gib": 1.5, "time/checkpoint_s": 2.0})])
    assert tracker.logged("checkpoint/gib") == {4}
    assert tracker.logged("another") == set()
    assert tracker.logged_through() == -1


AT_THE_SAME_MOMENT = """
import sys
from penstock.trackers.mlflow import MlflowTracker
from penstock.trackers.tracker import NewRun
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
tracker = MlflowTracker(sys.argv[1])
print(tracker.open(NewRun(sys.argv[2], "shared", {})))
tracker.configure({"seed": sys.argv[2]})
"""


@pytest.mark.slow
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
    tracker = _open(uri)
    for value in (0.1, 0.2):
        tracker.log(_iteration(1, {"reward/mean": value}))
    assert len(_history(tracker, "reward/mean")) == 2


@pytest.mark.parametrize("part", ["pass@1", "len(tokens)", "json, valid", "../x", "a//b", "é" * 300])
def test_a_part_of_a_reward_may_have_any_name(uri: str, part: str) -> None:
    """It is found again by its own name. Control: MLflow refuses it as it is."""
    tracker, name = _open(uri), f"reward/{part}_mean"
    with pytest.raises(MlflowException):
        connect(uri).log_metric(tracker.run, name, 1.0)
    tracker.log(_iteration(3, {name: 0.5}))
    assert tracker.logged(name) == {3}


def test_numbers_that_are_not_finite_become_gaps(uri: str) -> None:
    """A diverged iteration is logged, its infinity not as 1.8e308, and the next one still is."""
    tracker = _open(uri)
    tracker.log(_iteration(1, {"actor/loss": math.nan, "actor/kl": math.inf, "reward/mean": 0.5}))
    tracker.log(_iteration(2, {"actor/loss": 0.1, "actor/kl": 0.2, "reward/mean": 0.5}))
    kl = [value for _, value in _history(tracker, "actor/kl")]
    assert math.isnan(kl[0])
    assert kl[1] == 0.2
    assert tracker.logged_through() == 2


@pytest.mark.parametrize("ours", [True, False])
def test_more_figures_than_mlflow_takes_at_once_arrive(uri: str, monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """In calls of the size that a server takes. Control: the check of a server refuses all of them in one."""
    tracker, steps, log_batch = _open(uri), 1005, MlflowClient.log_batch

    def checked(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
        _validate_batch_log_limits(metrics, [], [])
        log_batch(client, run_id, metrics)

    monkeypatch.setattr(MlflowClient, "log_batch", checked)
    figures = [Figures(step, {"loss": float(step)}) for step in range(steps)]
    if ours:
        tracker.log(figures)
        assert tracker.logged("loss") == set(range(steps))
        return
    monkeypatch.setattr(module, "METRICS_PER_CALL", steps)
    with pytest.raises(MlflowException, match="1000"):
        tracker.log(figures)


def _table(folder: Path, iteration: int, rows: list[dict[str, Any]]) -> Table:
    path = folder / f"{iteration:06d}.json"
    path.write_text(table_text(rows), encoding="utf-8")
    return Table(f"samples/{path.name}", path)


def test_samples_are_a_table_that_mlflow_loads(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own reader finds the rows, and an iteration that is redone replaces its table."""
    tracker = _open(uri)
    for response in ("first", "<b>second</b>"):
        rows: list[dict[str, Any]] = [
            {"prompt": "2+2?", "response": response, "reward": 1.0},
            {"prompt": "ß", "response": "", "reward": 0.0},
        ]
        table_of_rows = _table(tmp_path, 12, rows)
        assert table_of_rows.rows() == rows
        tracker.table(table_of_rows)
    experiment = connect(uri).get_run(tracker.run).info.experiment_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # MLflow's reader searches the runs of the store in force
    table = connect(uri).load_table(experiment, "samples/000012.json", run_ids=[tracker.run])
    assert list(table.columns) == ["prompt", "response", "reward"]
    assert list(table["response"]) == ["<b>second</b>", ""]
    assert table["prompt"][1] == "ß"


def test_more_tables_than_mlflow_lists_do_not_end_the_run(uri: str, tmp_path: Path) -> None:
    """The list of tables never outgrows its tag (8000 characters, about 160 tables) and keeps the newest."""
    tracker = _open(uri)
    connect(uri).set_tag(
        tracker.run,
        "mlflow.loggedArtifacts",
        json.dumps([{"path": f"samples/{number:06d}.json", "type": "table"} for number in range(100)]),
    )
    tracker.table(_table(tmp_path, 100, [{"prompt": "p", "response": "r", "reward": 0.0}]))
    listed = json.loads(connect(uri).get_run(tracker.run).data.tags["mlflow.loggedArtifacts"])
    assert len(listed) == 100
    assert listed[-1]["path"] == "samples/000100.json"
    assert {"path": "samples/000000.json", "type": "table"} not in listed


@pytest.mark.parametrize(
    ("status", "shown"), [("completed", "FINISHED"), ("failed", "FAILED"), ("cancelled", "KILLED")]
)
def test_a_closed_run_has_its_status(uri: str, status: Status, shown: str) -> None:
    """The status that the flow ends with is the one that MLflow shows, as of the time that it is given."""
    tracker = _open(uri)
    assert connect(uri).get_run(tracker.run).info.status == "RUNNING"
    tracker.close(status, 1e9)
    found = connect(uri).get_run(tracker.run).info
    assert (found.status, found.end_time) == (shown, 10**12)
    assert tracker.status() == status


def test_a_file_is_lacking_that_is_not_there_or_of_another_size(uri: str, tmp_path: Path) -> None:
    """At the top and in a folder. Control: one that is there as it is."""
    tracker, files = _open(uri), {name: tmp_path / Path(name).name for name in ("a.json", "x/b.json", "x/c.json")}
    for path in files.values():
        path.write_text("{}")
    assert tracker.lacking(files) == set(files)
    for name in ("a.json", "x/b.json"):
        tracker.artifact(Artifact(name, "{}"))
    assert tracker.lacking(files) == {"x/c.json"}
    files["x/b.json"].write_text("{} longer")
    assert tracker.lacking(files) == {"x/b.json", "x/c.json"}


def test_a_model_points_at_its_folder_and_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, in the run's experiment, under a name that MLflow takes; a store does not find a run of another's."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri, folder = default_tracking_uri(tmp_path / "runs"), tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"0" * 5000)
    tracker = _open(uri)
    model_id = tracker.model(Model("sums/v1.5: best", folder, {"seed": "3"}))
    client = connect(uri)
    model = client.get_logged_model(model_id)
    assert (model.name, model.status, model.source_run_id) == ("sums-v1-5-best", "READY", tracker.run)
    assert model.tags[FOLDER] == str(folder)
    assert model.params == {"seed": "3"}
    assert [item.model_id for item in client.search_logged_models([model.experiment_id])] == [model_id]
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.parent != folder]
    assert not MlflowTracker(uri).find("0" * 32)


def test_a_deleted_experiment_is_the_users_to_restore(uri: str) -> None:
    """MLflow keeps the name of a deleted experiment: the error says how to get it back."""
    experiment = connect(uri).create_experiment("binned")
    connect(uri).delete_experiment(experiment)
    with pytest.raises(UserError, match=f"mlflow experiments restore -x {experiment}"):
        MlflowTracker(uri).open(NewRun("r", "binned", {}))


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
    assert default_tracking_uri(tmp_path) == "http://127.0.0.1:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    assert default_tracking_uri(Path("runs")) == f"sqlite:///{tmp_path.resolve()}/runs/mlflow.db"


def test_a_run_has_a_page(uri: str) -> None:
    """The link names the experiment and the run, at the local server for a database."""
    tracker = _open(uri)
    experiment = connect(uri).get_run(tracker.run).info.experiment_id
    path = f"/#/experiments/{experiment}/runs/{tracker.run}?workflowType=machine_learning"
    assert tracker.page == f"http://127.0.0.1:5000{path}"
    found = MlflowTracker(uri)
    assert found.find(tracker.run)
    assert found.page == tracker.page


def test_a_page_of_a_server_with_a_password_is_named_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report and two artifacts in Prefect link to it."""
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="7", lifecycle_stage="active"))
    store = SimpleNamespace(get_run=lambda _: run, search_experiments=lambda **_: [])
    monkeypatch.setattr(module, "connect", lambda _: store)
    tracker = MlflowTracker("https://alice:s3cret@mlflow.corp")
    assert tracker.find("abc")
    assert tracker.page.startswith("https://mlflow.corp/#/experiments/7/runs/abc")
    assert tracker.address == "https://mlflow.corp"


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
    assert flatten(config | {"critic": None, "groups": {}, "engine": {"eager": True}}) == {
        "name": "a",
        "actor.optimizer.learning_rate": '{"0": 1e-06, "100": 1e-07}',
        "actor.optimizer.betas": "[0.9, 0.95]",
        "critic": "null",
        "groups": "{}",
        "engine.eager": "true",
    }


def test_a_resumed_run_is_tagged_with_the_keys_that_changed(uri: str) -> None:
    """Its parameters stay, as MLflow wants. Control: with the same configuration there is no tag."""
    tracker = _open(uri)
    settings = flatten({"iterations": 2, "reward": {"timeout_s": 10.0}})
    assert tracker.configure(settings)
    assert not tracker.configure(settings)
    assert tracker.configure(flatten({"iterations": 3, "reward": {"timeout_s": 10.0}}))
    found = connect(uri).get_run(tracker.run).data
    assert found.tags[CHANGED] == "iterations=3"
    assert found.params["iterations"] == "2"


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    """Whether a run is to be begun or found; without its password, within a few tries."""
    tracker = MlflowTracker("http://alice:sesame@127.0.0.1:9")
    for asked in (lambda: tracker.open(NewRun("r", "exp", {})), lambda: tracker.find("abc")):
        with pytest.raises(UserError, match=r"no MLflow server answers at http://127.0.0.1:9 ") as caught:
            asked()
        assert "sesame" not in str(caught.value)


def test_the_page_is_that_of_the_newest_runs_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among those for training, where its runs are listed. MLflow's own store says which experiment it is.

    A comparison of runs, newer than they are, is none of them.

    Controls: a store without runs has none, and a folder without a database no pages at all.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert module.pages(tmp_path, 5000) is None
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    older, newer = (client.create_experiment(name) for name in ("older", "newer"))

    def address() -> str:
        found = module.pages(tmp_path, 5000)
        assert found is not None
        return found.address

    assert address() == "http://127.0.0.1:5000"
    client.create_run(newer, start_time=2)
    client.create_run(older, start_time=1)
    client.create_run(client.create_experiment(module.COMPARISONS), start_time=3)
    assert address() == f"http://127.0.0.1:5000/#/experiments/{newer}/runs?workflowType=machine_learning"


def test_runs_of_a_sweep_are_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the database of the directory that the sweep is in. Control: any other folder of runs has its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("sums-sweep", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "sums-sweep" / "sweep.yaml").touch()
    assert default_tracking_uri(tmp_path / "sums-sweep") == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert default_tracking_uri(tmp_path / "other") == f"sqlite:///{tmp_path / 'other' / 'mlflow.db'}"
    begun(default_tracking_uri(tmp_path))
    assert pages(tmp_path / "sums-sweep", 5000) is not None
    assert pages(tmp_path / "other", 5000) is None


def test_a_part_of_another_run_is_nested_below_it(tmp_path: Path) -> None:
    """As MLflow's pages show it. Control: a run that is part of none."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    whole, part = begun(uri), MlflowTracker(uri)
    part.open(NewRun("part", "exp", {PARENT: whole.run}))
    tags = [connect(uri).get_run(tracker.run).data.tags for tracker in (whole, part)]
    assert [item.get("mlflow.parentRunId") for item in tags] == [None, whole.run]
