"""Processes of a sweep: lanes are given back, ends are told, and nothing of a training is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.session.sweeps import trainings as module
from penstock.session.sweeps.lanes import Lane
from penstock.session.sweeps.trainings import Processes, processes
from tests.processes import ROOT, alive
from tests.waiting import until

PROGRAM = "tests.session.sweeps.program"  # in place of a training: ends as its argument says
SWEEP = f"""
import sys, time
from pathlib import Path
from penstock.session.sweeps import trainings
from penstock.session.sweeps.lanes import Lane
trainings.PROGRAM = {PROGRAM!r}
with trainings.processes([Lane(0)]) as started:
    started.start("one", "wait", Path(sys.argv[1]), {{}})
    print(started.running[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes run a program of the tests."""
    monkeypatch.setattr(module, "PROGRAM", PROGRAM)


def test_a_training_has_its_lane_until_it_ends(tmp_path: Path) -> None:
    """And tells how: its code, and what it said last. Its environment is the lane's, and has the deployment."""
    with processes([Lane(0, (("LANE", "zero"),)), Lane(1)]) as started:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT__FLOW_RUN_ID", "the sweep's own")
            patch.setenv("PREFECT__DEPLOYMENT_ID", "d")
            started.start("fails", "3", tmp_path / "logs" / "fails.log", {"PREFECT_API_URL": "http://here"})
        started.start("waits", "wait", tmp_path / "logs" / "waits.log", {})
        assert started.free == []
        ended = []
        until(lambda: ended.extend(started.ended()) or ended, 30, "the first one ends", 0.05)
        assert (ended[0].name, ended[0].flow_run, ended[0].code) == ("fails", "3", 3)
        assert ended[0].tail.splitlines() == [
            "lane zero, server http://here, flow run None, deployment d",
            "ends with 3",
        ]
        assert [lane.number for lane in started.free] == [0]
        assert [item.name for item in started.running] == ["waits"]


def test_leaving_the_block_ends_all_in_order(tmp_path: Path) -> None:
    """A training gets SIGTERM, and time for its last words. Control: it ran before."""
    log = tmp_path / "one.log"
    with processes([Lane(0)]) as started:
        started.start("one", "wait", log, {})
        pid = started.running[0].pid
        until(lambda: "waits" in log.read_text(), 30, "it has begun", 0.05)
        assert alive(pid)
    assert not alive(pid)
    assert log.read_text().splitlines()[-1] == "said its last words"


def test_nothing_is_left_of_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """Nor of what a training has started. Control: both lived before."""
    log = tmp_path / "one.log"
    command = [sys.executable, "-c", SWEEP, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as sweep:
        assert sweep.stdout is not None
        pid = int(sweep.stdout.readline())
        until(lambda: "waits" in log.read_text(), 30, "the training has a child", 0.05)
        child = int(log.read_text().split("child ")[1].split(",")[0])
        assert alive(pid) and alive(child)
        sweep.send_signal(signal.SIGKILL)
        until(lambda: not alive(pid) and not alive(child), 30, "both are gone", 0.05)


def test_no_lane_no_start() -> None:
    """A training that begins without a lane is a defect here, not one more at a time."""
    with pytest.raises(IndexError):
        Processes([]).start("one", "wait", Path("nowhere"), {})
