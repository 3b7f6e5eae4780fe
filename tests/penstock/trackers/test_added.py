"""A new tracker is one file, named in a recipe or in a line of the table: it gets all that a run records, each once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.preference import PreferenceConfig
from configs.schema import TrainConfig
from penstock.base.errors import UserError
from penstock.checks.training import check_supervised
from penstock.cli.main import _quiet_libraries
from penstock.cli.sync import sync
from penstock.session import session
from penstock.session.record import append_record
from penstock.session.session import Session, Training, write_config
from penstock.state.experience import write_columns
from penstock.state.manifest import Progress, read_manifest
from penstock.state.run_folder import RunFolder, truncate_metrics
from penstock.trackers import outbox
from penstock.trackers.table import TRACKERS, Kind, check_tracker, make_tracker, withheld
from penstock.trackers.tracker import ITERATION
from tasks.finetuning.record import record_warm_up, recording_preferences
from tasks.iteration import record
from tasks.iteration.checkpoint import begin_manifest
from tests.penstock.trackers.lines_tracker import Lines

TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}
THEIRS = "tests.penstock.trackers.lines_tracker:"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Training]:
    """Make a training that a tracker records, in a folder whose experience of three iterations is there."""
    run = RunFolder(tmp_path / "run")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(record, "keep_memory", lambda *_: None)
    monkeypatch.setattr(outbox, "RETRY_S", 0.05)

    def made(tracker: str) -> Training:
        settings = {"tracker": tracker, "experiment": "adding", "samples_every": 2}
        config = TrainConfig.model_validate({"record": settings})
        monkeypatch.setitem(session._SESSIONS, str(run.path), Session(config, run))
        texts = {name: ["a"] for name in ("sample_id", "prompt", "response")}
        for number in (1, 2, 3):
            path = run.experience(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_columns(path, {**texts, "reward": np.ones(1), "policy_version": np.zeros(1, np.int64)})
        write_config(run, config)
        return Training(str(run.path))

    return made


def attempt(training: Training, *iterations: int, fails: bool = False) -> None:
    """Train, as the flow does: take back what came after the checkpoint, record iterations, end."""
    with training.session().consolidator, record.recording(training):
        truncate_metrics(training.run, iterations[0] - 1)
        for number in iterations:
            record.record.fn(training, number, {"reward/mean": number / 10})
            if number == 1:
                begin_manifest(training, Progress(iteration=1))
        if fails:
            raise ZeroDivisionError


def held(run: RunFolder) -> list[dict[str, Any]]:
    """Return all lines that the tracker has of a run."""
    tracked = read_manifest(run).tracked
    assert tracked is not None
    (file,) = (run.path.parent / "lines").glob("*.jsonl")
    assert file.stem == tracked.run
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def steps(lines: list[dict[str, Any]], figure: str) -> list[int]:
    return [line["step"] for line in lines if figure in line.get("figures", ())]


@pytest.mark.parametrize("named", ["in the table", "in the recipe"])
def test_a_new_tracker_gets_a_run_and_its_resume_each_figure_once(
    make: Callable[[str], Training], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """`record.tracker` is a name of the table or a class of the user's; the resume repeats iteration 2.

    Control: `test_a_tracker_that_does_not_say_what_it_holds_gets_figures_twice`.
    """
    monkeypatch.setitem(TRACKERS, "lines", Kind(Lines, withheld=("LINES_PASSWORD",)))
    tracker = "lines" if named == "in the table" else f"{THEIRS}Lines"
    training = make(tracker)
    truncate_metrics(training.run.warm_up, -1)  # as restoring does before the first step
    record_warm_up.fn(training, 0, [3.0, 2.0])  # nothing takes it yet: it comes with the earlier attempts
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    assert steps(held(training.run), "reward/mean") == [0, 1, 2]
    assert held(training.run)[-1]["status"] == "failed"
    attempt(make(tracker), 2, 3)
    lines = held(training.run)
    assert steps(lines, "reward/mean") == steps(lines, ITERATION) == [0, 1, 2, 3]
    assert steps(lines, "warm_up/loss") == [1, 2]
    assert [line["status"] for line in lines if "status" in line] == ["failed", None, "completed"]
    assert [line["rows"][0]["reward"] for line in lines if line.get("table") == "samples/000002.json"]
    assert {line["artifact"] for line in lines if "artifact" in line} == {"config.yaml", "report", "summary.json"}
    assert [line["settings"]["record.tracker"] for line in lines if "settings" in line] == [tracker]
    assert lines[0]["tags"]["algorithm"] == "grpo"
    summary = json.loads(training.run.summary.read_text(encoding="utf-8"))
    assert (summary["tracked"]["tracker"], summary["tracked"]["label"]) == (tracker, "Lines")
    assert sync(training.run.path) == f"Lines ({training.run.path.parent / 'lines'}) held all of it already"
    assert "LINES_PASSWORD" in withheld()
    assert "MLFLOW_TRACKING_PASSWORD" in withheld()


def test_a_tracker_that_does_not_say_what_it_holds_gets_figures_twice(make: Callable[[str], Training]) -> None:
    """The control: that each comes once is what is asked of the tracker."""
    training = make(f"{THEIRS}Forgetful")
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    attempt(make(f"{THEIRS}Forgetful"), 2, 3)
    assert steps(held(training.run), "reward/mean") == [0, 1, 2, 0, 1, 2, 3]


def test_a_new_trackers_server_may_be_away(make: Callable[[str], Training], caplog: pytest.LogCaptureFixture) -> None:
    """The training ends, says what is lacking, and it is delivered later. Control: none of it is there before."""
    training = make(f"{THEIRS}Away")
    away = training.run.path.parent / "lines" / "away"
    away.parent.mkdir()
    away.touch()
    attempt(training, 1, 2)
    assert f"Deliver it with: penstock sync {training.run.path}" in caplog.text
    assert steps(held(training.run), "reward/mean") == []
    away.unlink()
    assert sync(training.run.path).endswith("now holds all of it")
    lines = held(training.run)
    assert steps(lines, "reward/mean") == [1, 2]
    assert lines[-1]["status"] == "completed"


def test_training_on_preferences_is_recorded_where_tracker_says(make: Callable[[str], Training]) -> None:
    """The key `tracker` of that tree. Control: the run has its step there, and MLflow is not begun."""
    training = make("mlflow")
    config = PreferenceConfig.model_validate({"tracker": f"{THEIRS}Lines", "experiment": "preferring"})
    begin_manifest(training, Progress())
    with recording_preferences(training, "preference", config):
        append_record(training, 1, {"loss": 0.5})
    lines = held(training.run)
    assert steps(lines, "loss") == [1]
    tracked = read_manifest(training.run).tracked
    assert tracked is not None
    assert (tracked.tracker, tracked.run) == (config.tracker, "preferring-0")


def test_what_its_library_reads_at_import_is_set_when_a_command_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table says. Control: what the user has set stays."""
    monkeypatch.setitem(TRACKERS, "lines", Kind(Lines, at_import={"LINES_QUIET": "yes"}))
    monkeypatch.setattr(os, "environ", {"MLFLOW_DISABLE_TELEMETRY": "false"})
    _quiet_libraries()
    assert (os.environ["LINES_QUIET"], os.environ["MLFLOW_DISABLE_TELEMETRY"]) == ("yes", "false")


def test_what_is_no_tracker_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A misspelt name, a class without a tracker's methods or texts. Control: the tracker that is meant."""
    config = TrainConfig.model_validate({"record": {"tracker": "mlfow"}, "model": TINY})
    with pytest.raises(UserError, match=r"record.tracker 'mlfow' is no tracker \(did you mean 'mlflow'\?\)") as caught:
        check_supervised(config)
    assert "There are: mlflow" in caught.value.remedy
    with pytest.raises(UserError, match="has no method 'open', 'find'"):
        check_tracker("tests.penstock.trackers.test_added:Empty")
    with pytest.raises(UserError, match="has no text 'label'"):
        make_tracker("tests.penstock.trackers.test_added:Nameless", tmp_path)
    assert make_tracker(f"{THEIRS}Lines", tmp_path).label == "Lines"


class Empty:
    """No tracker."""


class Nameless(Lines):
    """One that people would not know by a name."""

    label = None  # type: ignore[assignment]
