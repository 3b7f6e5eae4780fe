"""A new task of an iteration is one file and its line on the flow's page, as CONTRIBUTING.md says.

Its figures and its seconds are recorded without another word. The file is put into a copy of the packages, which
another process imports in their place; nothing else is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.state.run_folder import RunFolder, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

ROOT = Path(__file__).resolve().parents[2]
FILE = '''"""How far the lengths of an iteration's responses lie apart, invented for a test."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.session.session import Stage, Training, timed
from penstock.state.experience import read_columns


@task(task_run_name="length-spread-{iteration:06d}", cache_policy=NO_CACHE)
def length_spread(training: Training, iteration: int, stage: Stage) -> dict[str, float]:
    """Return the longest response's tokens less the shortest one's."""
    metrics: dict[str, float] = {}
    with timed(training, metrics, "length_spread"):
        lengths_B = read_columns(stage.experience.path, ["response_tokens"])["response_tokens"].lengths_B
    return metrics | {"rollout/length_spread": float(lengths_B.max() - lengths_B.min())}
'''
IMPORT = "from tasks.iteration.record import record\n"
LINE = "    metrics |= reshard(training, settings, version=number)\n"
ADDED = (
    (IMPORT, f"from tasks.iteration.length_spread import length_spread\n{IMPORT}"),
    (LINE, f"    metrics |= length_spread(training, number, stage)\n{LINE}"),
)
SMALL = (
    "iterations=2",
    "sft=null",
    "model.tiny={hidden_size: 64, layers: 1, heads: 2, kv_heads: 1}",
    "data.arithmetic={digits: 1, sft: 8, train: 16, heldout: 4}",
    "rollout={prompts: 4, samples: 2, max_response_tokens: 6, max_sequences: 8}",
    "checkpoint.every=0",
)
COMMAND = "from penstock.cli.main import main; main()"
FIGURES = ("rollout/length_spread", "time/length_spread_s", "share/length_spread")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the packages that a task is added to."""
    for package in ("flows", "tasks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def trained(folder: Path) -> list[dict[str, float]]:
    """Train in a process that has `folder` before the repository; return what it records of its iterations."""
    run = folder / "run"
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    command = [sys.executable, "-P", "-c", COMMAND, "train", recipe, *SMALL, "--run", str(run)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PREFECT_HOME": str(folder / "prefect"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["metrics"] for record in read_metrics(RunFolder(run)) if record["iteration"] > 0]


def test_a_new_task_is_one_file_and_its_line_in_the_flow(folder: Path) -> None:
    """Its figure, its seconds and its share of the iteration are there. Control: the next test."""
    (folder / "tasks" / "iteration" / "length_spread.py").write_text(FILE, encoding="utf-8")
    page = folder / "flows" / "iteration.py"
    text = page.read_text(encoding="utf-8")
    for before, after in ADDED:
        assert text.count(before) == 1
        text = text.replace(before, after)
    page.write_text(text, encoding="utf-8")
    records = trained(folder)
    assert len(records) == 2
    for record in records:
        assert record["rollout/length_spread"] >= 0
        assert record["time/length_spread_s"] > 0
        assert 0 < record["share/length_spread"] < 1


def test_without_its_line_nothing_of_a_task_is_recorded(folder: Path) -> None:
    """The control, in the same copy: the file alone does nothing."""
    (folder / "tasks" / "iteration" / "length_spread.py").write_text(FILE, encoding="utf-8")
    assert not any(name in record for record in trained(folder) for name in FIGURES)
