"""`penstock chaos`: processes of a training that are killed at random leave no trace in it. The short run of CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.benchmarks.reporting.result import read_result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("faults")]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=10",
    "sft=null",
    "data.arithmetic={digits: 2, sft: 256, train: 128, heldout: 16}",
    "rollout={prompts: 8, samples: 4}",
    "checkpoint.every=5",
)


@pytest.mark.exhaustive
def test_what_is_killed_leaves_no_trace(tmp_path: Path) -> None:
    """All kills fell in runs that are equal to the one left alone, to the last bit; no process is left over."""
    out = tmp_path / "result.json"
    words = ["chaos", "configs/quickstart.yaml", *SMALL, "--kills", "2", "--pause", "1", "--seed", "3"]
    command = [sys.executable, "-m", "penstock.cli.main", *words, "--folder", str(tmp_path / "runs"), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = read_result(out).figures
    assert (figures["kills"], figures["equal"], figures["orphans"]) == (2, 2, 0)
    assert "2 of 2 kills left no trace, 0 processes left over" in done.stdout


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    """Before anything starts."""
    command = [sys.executable, "-m", "penstock.cli.main", "chaos", "configs/quickstart.yaml", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "exists already" in done.stderr
