"""A run in several trackers: each gets all of it once, by itself; the first is the main one."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.cli.runs.pages import pages_of_run
from penstock.cli.runs.sync import sync
from penstock.configs.loading.load import parse_override
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.engines.groups.interface import free_port
from penstock.session.record import append_record, links
from penstock.session.session import Training
from penstock.state.digests import write_sealed
from penstock.state.manifest import Tracked, read_manifest
from penstock.state.run_folder import RunFolder
from penstock.tasks.iteration import record
from penstock.trackers.mlflow import connect, default_tracking_uri
from penstock.trackers.prometheus import PORT_VARIABLE
from penstock.trackers.table import TRACKERS, check_trackers
from tests.delivering import await_delivery
from tests.trackers import test_tensorboard
from tests.trackers.lines_tracker import Lines
from tests.trackers.test_added import THEIRS, attempt, recorded_training, steps

LINES = f"{THEIRS}Lines"


def in_mlflow(run: RunFolder, figure: str = "reward/mean") -> list[int]:
    client = connect(default_tracking_uri(run.path.parent))
    (name,) = [item.run for item in read_manifest(run).tracked if item.tracker == "mlflow"]
    return [entry.step for entry in client.get_metric_history(name, figure)]


def in_lines(run: RunFolder) -> list[dict[str, Any]]:
    (file,) = (run.path.parent / "lines").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_tracker_gets_a_run_and_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure once in each, in runs that the manifest and the summary name. Control: the first is the main one."""
    monkeypatch.setenv(PORT_VARIABLE, str(free_port("127.0.0.1")))
    names = ["tensorboard", "mlflow", LINES, "prometheus"]
    training = recorded_training(tmp_path, monkeypatch, names)
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    first = read_manifest(training.run).tracked
    training = recorded_training(tmp_path, monkeypatch, names)
    attempt(training, 2, 3)
    run = training.run
    assert read_manifest(run).tracked == first
    assert [item.tracker for item in first] == names
    assert in_mlflow(run) == test_tensorboard.steps(run, "reward/mean") == [0, 1, 2, 3]
    assert steps(in_lines(run), "reward/mean") == [0, 1, 2, 3]
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert [item["label"] for item in summary["tracked"]] == ["TensorBoard", "MLflow", "Lines", "Prometheus"]
    assert list(links(training)) == ["Run folder", "MLflow run"], "those that have a page of their own"
    shown = pages_of_run(summary, "penstock ui")
    assert shown["MLflow"].startswith("penstock ui   then http://127.0.0.1:5000")
    assert shown["TensorBoard"].startswith("penstock ui   then http://127.0.0.1:5001")
    assert "Prometheus" not in shown, "it shows nothing of a run that has ended"
    said = sync(run.path).splitlines()
    assert [line.rpartition(" held")[0].split()[0] for line in said] == ["TensorBoard", "MLflow", "Lines"]


def test_one_that_is_away_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have all of it, and one line says what that one lacks. Control: it gets it later."""
    away = tmp_path / "lines" / "away"
    away.parent.mkdir()
    away.touch()
    training = recorded_training(tmp_path, monkeypatch, [f"{THEIRS}Away", "mlflow"])
    with training.session().consolidator, record.recording(training):
        append_record(training, 1, {"reward/mean": 0.1})
        _await_last(training)
        assert in_mlflow(training.run) == [1]
    assert caplog.text.count("Deliver it with: penstock sync") == 1
    assert steps(in_lines(training.run), "reward/mean") == []
    away.unlink()
    assert [line.split()[-4:] for line in sync(training.run.path).splitlines()] == [
        ["holds", "all", "of", "it"],
        ["all", "of", "it", "already"],
    ]
    assert steps(in_lines(training.run), "reward/mean") == [1]


def _await_last(training: Training) -> None:
    outbox, done = training.session().outboxes[-1], threading.Event()
    outbox.put("nothing more", done.set)
    assert done.wait(60)


def test_a_resume_may_name_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is new gets all that the run holds; one that is named no more stays as it is. Control: one goes on."""
    training = recorded_training(tmp_path, monkeypatch, ["mlflow", LINES])
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    first = read_manifest(training.run).tracked
    training = recorded_training(tmp_path, monkeypatch, ["tensorboard", "mlflow"])
    attempt(training, 2, 3)
    run = training.run
    assert read_manifest(run).tracked == (Tracked("tensorboard", "run"), first[0])
    assert in_mlflow(run) == [0, 1, 2, 3]
    assert sorted(test_tensorboard.steps(run, "reward/mean")) == [0, 1, 2, 3]
    assert steps(in_lines(run), "reward/mean") == [0, 1, 2]


def test_a_run_of_before_goes_on_in_its_one_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest holds one tracked run and no list. Control: a manifest that holds none begins another."""
    training = recorded_training(tmp_path, monkeypatch, "mlflow")
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    (tracked,) = read_manifest(training.run).tracked
    assert in_manifest(training.run, {"tracker": "mlflow", "run": tracked.run}) == (tracked,)
    attempt(recorded_training(tmp_path, monkeypatch, "mlflow"), 2, 3)
    assert read_manifest(training.run).tracked == (tracked,)
    assert in_mlflow(training.run) == [0, 1, 2, 3]
    assert in_manifest(training.run, None) == ()
    attempt(recorded_training(tmp_path, monkeypatch, "mlflow"), 2, 3)
    assert read_manifest(training.run).tracked != (tracked,)


def in_manifest(run: RunFolder, tracked: Any) -> tuple[Tracked, ...]:
    """Write what a manifest of before held, and return what is read."""
    values = json.loads(run.manifest.read_text(encoding="utf-8"))
    del values["sha256"]
    write_sealed(run.manifest, values | {"tracked": tracked})
    return read_manifest(run).tracked


def test_a_run_in_trackers_of_which_one_does_not_begin_is_ended_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt goes on in the run that was begun. Control: it completes."""
    training = recorded_training(tmp_path, monkeypatch, ["mlflow", LINES])

    def refuses(*_: object) -> str:
        raise UserError("it does not begin")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="it does not begin"):
        patch.setattr(Lines, "open", refuses)
        attempt(training, 0)
    (begun,) = read_manifest(training.run).tracked
    client = connect(default_tracking_uri(tmp_path))
    assert client.get_run(begun.run).info.status == "FAILED"
    attempt(recorded_training(tmp_path, monkeypatch, ["mlflow", LINES]), 1)
    assert read_manifest(training.run).tracked[0] == begun
    assert client.get_run(begun.run).info.status == "FINISHED"


def test_the_flows_thread_leaves_figures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tracker is given them on a thread of its own, which may stand still. Control: each is given them."""
    callers, hangs = Counter[int](), threading.Event()

    def log(*_: object) -> None:
        callers[threading.get_ident()] += 1
        assert hangs.wait(60)

    monkeypatch.setattr(Lines, "log", log)
    training = recorded_training(tmp_path, monkeypatch, [LINES, f"{THEIRS}Forgetful"])
    with training.session().consolidator, record.recording(training):
        for number in range(1, 4):
            append_record(training, number, {"reward/mean": 0.1})
        hangs.set()
        await_delivery(training)
    assert len(callers) == 2
    assert threading.get_ident() not in callers


def test_several_are_named_by_a_list() -> None:
    """In a recipe and on the command line, in both trees. Controls: an empty list, one name twice, an unknown one."""
    (override,) = [parse_override("record.tracker=[mlflow, tensorboard]", TrainConfig)]
    assert names_of_trackers(TrainConfig.model_validate(override).record.tracker) == ["mlflow", "tensorboard"]
    assert names_of_trackers(PreferenceConfig.model_validate({"tracker": ["wandb"]}).tracker) == ["wandb"]
    with pytest.raises(ValidationError, match="it is empty"):
        TrainConfig.model_validate({"record": {"tracker": []}})
    with pytest.raises(ValidationError, match="it has 'mlflow' twice"):
        TrainConfig.model_validate({"record": {"tracker": ["mlflow", "mlflow"]}})
    with pytest.raises(UserError, match="record.tracker 'tensorbord' is no tracker"):
        check_trackers(["mlflow", "tensorbord"])


def test_the_list_of_keys_names_all_trackers() -> None:
    """For who fills in a form. Control: a class of the user's is named, too."""
    for tree in (TrainConfig.model_fields["record"].annotation, PreferenceConfig):
        description = tree.model_fields["tracker"].description or ""
        assert all(name in description for name in [*TRACKERS, "module:Class"])
