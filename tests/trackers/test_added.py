"""A new tracker is one file, named in a recipe or in a line of the table: it gets all that a run records, each once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.checks.training import check_supervised
from penstock.cli.libraries import quiet_libraries
from penstock.cli.runs.sync import sync
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.session import session
from penstock.session.record import append_record
from penstock.session.session import Session, Training, write_config
from penstock.state.experience import write_columns
from penstock.state.manifest import Progress, read_manifest
from penstock.state.run_folder import RunFolder, truncate_metrics
from penstock.tasks.finetuning.record import record_warm_up, recording_preferences
from penstock.tasks.iteration import record
from penstock.tasks.iteration.checkpoint import begin_manifest
from penstock.trackers import outbox
from penstock.trackers.table import TRACKERS, Kind, check_tracker, make_tracker
from penstock.trackers.tracker import ITERATION
from tests.trackers.lines_tracker import Lines

TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}
THEIRS = "tests.trackers.lines_tracker:"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Training]:
    """Make a training that a tracker records."""
    return partial(recorded_training, tmp_path, monkeypatch)


def recorded_training(folder: Path, patch: pytest.MonkeyPatch, tracker: str | list[str]) -> Training:
    """Return a training in `folder` that trackers record, and whose experience of three iterations is there."""
    run = RunFolder(folder / "run")
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.setattr(record, "keep_memory", lambda *_: None)
    patch.setattr(outbox, "RETRY_S", 0.05)
    settings = {"tracker": tracker, "experiment": "adding", "samples_every": 2}
    config = TrainConfig.model_validate({"record": settings})
    patch.setitem(session._SESSIONS, str(run.path), Session(config, run))
    texts = {name: ["a"] for name in ("sample_id", "prompt", "response")}
    for number in (1, 2, 3):
        path = run.experience(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_columns(path, {**texts, "reward": np.ones(1), "policy_version": np.zeros(1, np.int64)})
    write_config(run, config)
    return Training(str(run.path))


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
    (tracked,) = read_manifest(run).tracked
    (file,) = (run.path.parent / "lines").glob("*.jsonl")
    assert file.stem == tracked.run
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def steps(lines: list[dict[str, Any]], figure: str) -> list[int]:
    return [line["step"] for line in lines if figure in line.get("figures", ())]


def test_a_new_tracker_gets_a_run_and_its_resume_each_figure_once(make: Callable[[str], Training]) -> None:
    """`record.tracker` is a class of the user's; the resume repeats iteration 2.

    Control: `test_a_tracker_that_does_not_say_what_it_holds_gets_figures_twice`.
    """
    tracker = f"{THEIRS}Lines"
    training = make(tracker)
    truncate_metrics(training.run.warm_up, -1)  # as restoring does before the first step
    record_warm_up.fn(
        training, 0, [{"loss": 3.0}, {"loss": 2.0}]
    )  # nothing takes it yet: it comes with the earlier attempts
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
    assert (summary["tracked"][0]["tracker"], summary["tracked"][0]["label"]) == (tracker, "Lines")
    assert sync(training.run.path) == f"Lines ({training.run.path.parent / 'lines'}) held all of it already"


PROGRAM = """
import sys
from pathlib import Path
import pytest
from penstock.trackers.table import withheld
from tests.trackers.test_added import attempt, held, recorded_training, steps
with pytest.MonkeyPatch.context() as patch:
    folder = Path(sys.argv[1])
    with pytest.raises(ZeroDivisionError):
        attempt(recorded_training(folder, patch, "lines"), 0, 1, 2, fails=True)
    training = recorded_training(folder, patch, "lines")
    attempt(training, 2, 3)
    print(steps(held(training.run), "reward/mean"))
    print("LINES_PASSWORD" in withheld(), "MLFLOW_TRACKING_PASSWORD" in withheld())
"""
IMPORT = "from penstock.trackers import mlflow, prometheus, tensorboard, wandb\n"
LINE = '    "mlflow": Kind('
ADDED = (
    (IMPORT, IMPORT.replace("import ", "import lines, ")),
    (LINE, f'    "lines": Kind(lines.Lines, withheld=("LINES_PASSWORD",)),\n{LINE}'),
)


@pytest.mark.parametrize("listed", [True, False])
def test_a_tracker_of_the_package_is_its_file_and_a_line_of_the_table(tmp_path: Path, listed: bool) -> None:
    """In a copy of the package, of which other processes take it; nothing else is touched. Control: the file alone."""
    shutil.copytree(ROOT / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("lines_tracker.py"), tmp_path / "penstock" / "trackers" / "lines.py")
    table = tmp_path / "penstock" / "trackers" / "table.py"
    text = table.read_text(encoding="utf-8")
    for before, after in ADDED:
        assert text.count(before) == 1
        text = text.replace(before, after)
    if listed:
        table.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if listed:
        assert done.stdout.splitlines()[-2:] == ["[0, 1, 2, 3]", "True True"], done.stderr
    else:
        assert "record.tracker 'lines' is no tracker" in done.stderr


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
    """By the key `tracker` of that tree, and nowhere else. Control: where it says `mlflow`, MLflow is begun."""
    training = make("mlflow")
    config = PreferenceConfig.model_validate({"tracker": f"{THEIRS}Lines", "experiment": "preferring"})
    begin_manifest(training, Progress())
    with recording_preferences(training, "preference", config):
        append_record(training, 1, {"loss": 0.5})
    database = training.run.path.parent / "mlflow.db"
    assert not database.exists()
    lines = held(training.run)
    assert steps(lines, "loss") == [1]
    (tracked,) = read_manifest(training.run).tracked
    assert (tracked.tracker, tracked.run) == (config.tracker, "preferring-0")
    begin_manifest(make("mlflow"), Progress())
    with recording_preferences(training, "preference", PreferenceConfig()):
        append_record(training, 1, {"loss": 0.5})
    assert database.exists()


def test_what_its_library_reads_at_import_is_set_when_a_command_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table says. Control: what the user has set stays."""
    monkeypatch.setitem(TRACKERS, "lines", Kind(Lines, at_import={"LINES_QUIET": "yes"}))
    monkeypatch.setattr(os, "environ", {"MLFLOW_DISABLE_TELEMETRY": "false"})
    quiet_libraries()
    assert (os.environ["LINES_QUIET"], os.environ["MLFLOW_DISABLE_TELEMETRY"]) == ("yes", "false")


def test_what_is_no_tracker_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A misspelt name, a class without a tracker's methods or texts. Control: the tracker that is meant."""
    config = TrainConfig.model_validate({"record": {"tracker": "mlfow"}, "model": TINY})
    with pytest.raises(UserError, match=r"record.tracker 'mlfow' is no tracker \(did you mean 'mlflow'\?\)") as caught:
        check_supervised(config)
    assert "There are: mlflow" in caught.value.remedy
    with pytest.raises(UserError, match="has no method 'open', 'find'"):
        check_tracker("tests.trackers.test_added:Empty")
    with pytest.raises(UserError, match="has no text 'label'"):
        make_tracker("tests.trackers.test_added:Nameless", tmp_path)
    assert make_tracker(f"{THEIRS}Lines", tmp_path).label == "Lines"


class Empty:
    """No tracker."""


class Nameless(Lines):
    """One that people would not know by a name."""

    label = None  # type: ignore[assignment]
