"""A disk that is full, for real: a small file system of the test's own, which only its processes see."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session import record as session_record
from penstock.session.flow_runs.failures import told
from penstock.session.record import at_the_end, close
from penstock.session.session import Training
from penstock.state.manifest import Manifest, Progress, Tracked, write_manifest
from penstock.state.run_folder import append_metrics
from penstock.tasks.iteration.record import summarize
from tests.delivering import in_mlflow, with_outbox
from tests.faults.full_disk import PLACES
from tests.training import training_with as training_with

ROOT = Path(__file__).resolve().parents[2]
FULL = "No space left on device"
OWN_DISK = ["unshare", "--map-root-user", "--mount"]
MakeTraining = Callable[[TrainConfig], Training]


def _mounts(folder: Path) -> bool:
    """Whether this process may have a file system of its own."""
    command = [*OWN_DISK, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk")
    if not _mounts(folder):
        pytest.skip("no file systems of one's own on this machine")
    return _found_by("tests.faults.full_disk", folder)


def _found_by(program: str, folder: Path) -> dict[str, Any]:
    """Return what a program found that may mount."""
    command = [*OWN_DISK, sys.executable, "-m", program, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(folder.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_what_does_not_fit_fails_by_name_and_leaves_what_was_there(place: str, outcomes: dict[str, Any]) -> None:
    """A reader sees nothing of the attempt. Control: with room the same call works, and is seen."""
    assert FULL in outcomes[place]["error"]
    assert outcomes[place]["unchanged"]
    assert outcomes[place]["works_again"]


def test_a_full_disk_is_told_in_words_and_is_no_mistake_in_the_command() -> None:
    """Control: another error of a file that only Penstock knows of is a defect, with its traceback."""
    error = OSError(28, FULL, "runs/a/metrics.jsonl")
    error.add_note("Continue with: penstock train --resume runs/a")
    words, code = told(error, ["train"]) or ("", 0)
    assert words.startswith(f"runs/a/metrics.jsonl: {FULL}; make room")
    assert words.endswith("Continue with: penstock train --resume runs/a")
    assert code == 1
    assert told(OSError(5, "Input/output error", "runs/a/metrics.jsonl"), ["train"]) is None


@pytest.fixture
def finished(training_with: MakeTraining, tmp_path: Path) -> Training:
    """A training that has done all its iterations and is recorded in MLflow."""
    training = training_with(TrainConfig(iterations=1))
    append_metrics(training.run, 1, {"reward/mean": 0.5})
    write_manifest(training.run, Manifest(Progress(iteration=1), tracked=(Tracked("mlflow", "r"),)))
    in_mlflow(training, f"sqlite:///{tmp_path / 'mlflow.db'}")
    return with_outbox(training)


@pytest.mark.parametrize("what", ["report", "summary.json"])
def test_a_disk_that_fills_at_the_end_fails_no_training_that_is_done(
    what: str, finished: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What lacks is named with the command that makes up for it, and without a summary the run is not complete.

    Controls: with room there is a summary; a training that failed fails with what its end could not write.
    """

    def full(*_: object) -> None:
        raise OSError(28, FULL)

    def report(training: Training, summary: dict[str, Any]) -> None:
        if what == "report":
            full()

    with monkeypatch.context() as patch:
        if what != "report":
            patch.setattr(session_record, "write_text", full)
        close(finished, summarize(finished, "completed"), report)
        assert f"the training is done, but {'the ' * (what == 'report')}{what} could not be written" in caplog.text
        assert f"penstock train --resume {finished.run.path}" in caplog.text
        assert not finished.run.summary.exists()
        with pytest.raises(OSError, match=FULL):
            close(finished, summarize(finished, "failed"), report)
    finished.session().lacks.clear()
    close(finished, summarize(finished, "completed"), lambda *_: None)
    assert json.loads(finished.run.summary.read_text())["status"] == "completed"


def test_only_a_disk_is_borne_at_the_end(finished: Training, caplog: pytest.LogCaptureFixture) -> None:
    """A defect is none of the disk's."""
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError), at_the_end(finished, "the report"):
        raise ValueError("a defect")
    assert finished.session().lacks == []


# A disk of its own for the run folder, which is full from the moment at which the model is there; then there is room.
FILLING = r"""
set -u
mount -t tmpfs -o size=200m tmpfs "$1"
cd "$1"
(
  until [ -e run/models/final/config.json ]; do sleep 0.01; done
  fallocate -l "$(df --output=avail -B1 . | tail -1)" ballast  # at once; what is left of it is filled after that
  while sleep 0.01; do cat /dev/zero >> ballast; done  # and what a checkpoint gives back that found no room
) 2>/dev/null &
filling=$!
"$2" -m penstock.cli.main train "$3" --run run "${@:4}"
echo "the training: $?"
kill $filling; wait $filling
ls run/summary.json
rm ballast
"$2" -m penstock.cli.main train --resume run
echo "the resume: $?"
cat run/summary.json
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_whose_disk_fills_at_its_end_is_done_and_a_resume_writes_the_rest(
    tmp_path: Path, prefect_api: str
) -> None:
    """With everything that a training is made of. Control: the summary comes with the room."""
    (disk := tmp_path / "disk").mkdir()
    if not _mounts(disk):
        pytest.skip("no file systems of one's own on this machine")
    overrides = ("iterations=2", "sft=null", "rollout.prompts=8", "evaluate.every=2")
    own = {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    own |= {"PREFECT_API_URL": prefect_api}
    command = [
        *OWN_DISK,
        "bash",
        "-c",
        FILLING,
        "bash",
        str(disk),
        sys.executable,
        str(ROOT / "configs/quickstart.yaml"),
    ]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, env=os.environ | own, timeout=800)
    said = " ".join(done.stdout.split())
    assert "the training: 0" in said, done.stdout + done.stderr
    assert "the training is done, but the report could not be written" in " ".join((said + done.stderr).split())
    assert "cannot access 'run/summary.json'" in done.stderr
    assert "the resume: 0" in said, done.stdout + done.stderr
    assert '"status": "completed"' in said
