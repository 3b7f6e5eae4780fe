"""A sweep as it is used: killed half way it loses nothing, a training that fails ends no other, and all are one report.

Real trainings in processes of their own, four of them, on the CPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from penstock.cli.terminal import short_path
from penstock.state.manifest import ended
from penstock.state.run_folder import RunFolder
from penstock.state.sweep import SweepFolder, read_sweep
from penstock.trackers.mlflow import connect
from tests.flows.reward_functions import BREAK
from tests.processes import alive
from tests.training import SHORTEST
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 900.0  # for what takes half a minute on a quiet machine
RATE = "actor.optimizer.learning_rate"
SMALL = (
    *SHORTEST,
    "checkpoint.every=1",
    "record={samples_every: 1, experiment: rates}",
    "reward.timeout_s=120",
    "engine.heartbeat_timeout_s=120",
)


@dataclass(frozen=True)
class Sweeps:
    """Starts `penstock sweep` as a person does."""

    folder: Path
    environment: dict[str, str]

    @property
    def said(self) -> str:
        """What all of the commands have printed."""
        return (self.folder / "said.txt").read_text(encoding="utf-8")

    @property
    def sweep(self) -> SweepFolder:
        """The folder of the one sweep."""
        (path,) = (self.folder / "runs").glob("quickstart-sweep-*")
        return SweepFolder(path)

    def runs(self) -> list[RunFolder]:
        """Return the run folders of all trainings, in order."""
        return [self.sweep.run(training) for training in read_sweep(self.sweep).trainings]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        with (self.folder / "said.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "sweep", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def told(self, text: str, process: subprocess.Popen[bytes], times: int = 1) -> None:
        """Wait until a running command has said something so often."""
        until(lambda: self.said.count(text) >= times or process.poll() is not None, WAIT_S, f"it says {text!r}", 0.05)
        assert self.said.count(text) >= times, self.said


@pytest.fixture
def sweeps(tmp_path: Path, prefect_api: str) -> Sweeps:
    """A folder, and a file that breaks the reward function once it is there."""
    own = {"PREFECT_API_URL": prefect_api, BREAK: str(tmp_path / "break")}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return Sweeps(tmp_path, inherited | own | {"PENSTOCK_ALLOWED_MODULES": "tests"})


def content(run: RunFolder) -> dict[str, tuple[int, str]]:
    """Return when every file of a run was written, and what it holds."""
    files = [path for path in sorted(run.path.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def test_a_killed_sweep_goes_on_and_a_failed_training_ends_no_other(sweeps: Sweeps) -> None:
    """Two rates with two seeds. Control: finished trainings are not touched, the others are done, once each."""
    given = [*SMALL, f"folder={sweeps.folder / 'runs'}"]
    first = sweeps.start("configs/quickstart.yaml", f"{RATE}=1e-3,3e-3", "seed=0,1", *given)
    sweeps.told(" is done after ", first, times=2)
    until(lambda: sweeps.runs()[2].manifest.is_file(), WAIT_S, "the third one has begun", 0.05)
    below = psutil.Process(first.pid).children(recursive=True)
    assert any("swept" in " ".join(process.cmdline()) for process in below)
    first.kill()
    assert first.wait(20) == -signal.SIGKILL
    until(lambda: not any(alive(process) for process in below), 30, "nothing of it is left")
    done = {run.name: content(run) for run in sweeps.runs()[:2]}
    assert [ended(run) for run in sweeps.runs()] == [True, True, False, False], sweeps.said

    second = sweeps.start("--resume", str(sweeps.sweep.path))
    sweeps.told(" goes on: ", second)
    Path(sweeps.environment[BREAK]).touch()
    sweeps.told(" failed after ", second)
    Path(sweeps.environment[BREAK]).unlink()
    assert second.wait(WAIT_S) == 1, sweeps.said
    assert [ended(run) for run in sweeps.runs()] == [True, True, False, True], sweeps.said
    third = sweeps.runs()[2].name
    assert f"1 of 4 trainings failed:\n    {third} (exit code 2)" in sweeps.said
    with chdir(ROOT):  # where the command runs
        assert f"Continue with: penstock sweep --resume {short_path(sweeps.sweep.path)}\n" in sweeps.said
    assert "3 of 4 trainings of configs/quickstart.yaml came to their end" in report(sweeps)

    last = sweeps.start("--resume", str(sweeps.sweep.path))
    assert last.wait(WAIT_S) == 0, sweeps.said
    assert all(ended(run) for run in sweeps.runs()), sweeps.said
    assert {run.name: content(run) for run in sweeps.runs()[:2]} == done
    assert sweeps.said.count(" begins: ") == 4 and sweeps.said.count(" is done after ") == 4
    page = report(sweeps)
    assert "4 of 4 trainings" in page and "Best by heldout/accuracy: " in page
    assert "paired t-test, 2 seeds" in page and f"{RATE}=0.001" in page
    assert {"compare.html", "compare.png", "groups.csv", "significance.csv"} <= {
        path.name for path in sweeps.sweep.report.iterdir()
    }
    nested(sweeps)


def report(sweeps: Sweeps) -> str:
    """Return the report."""
    return (sweeps.sweep.report / "compare.md").read_text(encoding="utf-8")


def nested(sweeps: Sweeps) -> None:
    """MLflow, beside the other runs of the directory, has one run for each training below that of the sweep."""
    client = connect(f"sqlite:///{sweeps.folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rates")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs.pop(sweeps.sweep.path.name)
    assert parent.info.status == "FINISHED"
    assert "report/compare.md" in {item.path for item in client.list_artifacts(parent.info.run_id, "report")}
    assert runs.keys() == {run.name for run in sweeps.runs()}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
