"""A new task of an iteration is one file and its line on the flow's page, and a new command of ranks two, as
CONTRIBUTING.md says.

Its figures and its seconds are recorded without another word. The files are put into a copy of the packages, which
other processes import in their place; nothing else is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from penstock.state.run_folder import RunFolder, read_metrics
from tests.test_rooms import crowded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

ROOT = Path(__file__).resolve().parents[2]
FILE = '''"""How far the lengths of an iteration's responses lie apart, invented for a test."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.engines.commands.length_spread import CountParameters
from penstock.session.session import Stage, Training, timed
from penstock.state.experience import read_columns


@task(task_run_name="length-spread-{iteration:06d}", cache_policy=NO_CACHE)
def length_spread(training: Training, iteration: int, stage: Stage) -> dict[str, float]:
    """Return the longest response's tokens less the shortest one's."""
    metrics: dict[str, float] = {}
    with timed(training, metrics, "length_spread"):
        lengths_B = read_columns(stage.experience.path, ["response_tokens"])["response_tokens"].lengths_B
        counts = training.session().call("actor", CountParameters(), f"{iteration}/length_spread")
    metrics["length_spread/parameters"] = float(counts[0].parameters)
    return metrics | {"rollout/length_spread": float(lengths_B.max() - lengths_B.min())}
'''
COMMANDS = '''"""What a task that was invented for a test asks of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Counted:
    """How many numbers the actor's weights are."""

    parameters: int


@dataclass(frozen=True)
class CountParameters(Command[Counted]):
    """Count the actor's weights."""
'''
HANDLERS = '''"""Carries out what a task that was invented for a test asks."""

from __future__ import annotations

from penstock.engines.commands.length_spread import Counted, CountParameters
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out


@carries_out(CountParameters)
def count_parameters(models: RankModels, command: CountParameters) -> Counted:
    """Count them."""
    return Counted(sum(parameter.numel() for parameter in models.lm.parameters()))
'''
IMPORT = "from penstock.tasks.iteration.record import record\n"
LINE = "    metrics |= reshard(training, settings, version=number)\n"
ADDED = (
    (IMPORT, f"from penstock.tasks.iteration.length_spread import length_spread\n{IMPORT}"),
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
PROGRAM = "from penstock.cli.main import main; main()"
FIGURES = ("rollout/length_spread", "time/length_spread_s", "share/length_spread")


@pytest.fixture
def folder(prefect_harness: None, tmp_path: Path) -> Path:
    """A copy of the package with the files of a task, whose line is not on the flow's page yet."""
    shutil.copytree(ROOT / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    for room, text in (
        ("penstock/tasks/iteration", FILE),
        ("penstock/engines/commands", COMMANDS),
        ("penstock/engines/ranks", HANDLERS),
    ):
        (tmp_path / room / "length_spread.py").write_text(text, encoding="utf-8")
    return tmp_path


def give_it_its_line(folder: Path) -> None:
    page = folder / "penstock" / "flows" / "iteration.py"
    text = page.read_text(encoding="utf-8")
    for before, after in ADDED:
        assert text.count(before) == 1
        text = text.replace(before, after)
    page.write_text(text, encoding="utf-8")


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    """Train in a process that has `folder` before the repository."""
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    command = [sys.executable, "-P", "-c", PROGRAM, "train", recipe, *SMALL, "--run", str(folder / "run")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def trained(folder: Path) -> list[dict[str, float]]:
    """Train; return what is recorded of the iterations."""
    done = train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["metrics"] for record in read_metrics(RunFolder(folder / "run")) if record["iteration"] > 0]


def test_a_new_task_is_its_files_and_its_line_in_the_flow(folder: Path) -> None:
    """Its figure, the ranks' reply, its seconds and its share of the iteration are there. Controls: the next two."""
    give_it_its_line(folder)
    assert crowded(folder, "penstock") == {}
    records = trained(folder)
    assert len(records) == 2
    for record in records:
        assert record["rollout/length_spread"] >= 0
        assert record["length_spread/parameters"] > 64 * 64
        assert record["time/length_spread_s"] > 0
        assert 0 < record["share/length_spread"] < 1


@pytest.mark.exhaustive
def test_without_its_line_nothing_of_a_task_is_recorded(folder: Path) -> None:
    """A control, in the same copy: the files alone do nothing."""
    assert not any(name in record for record in trained(folder) for name in FIGURES)


@pytest.mark.exhaustive
def test_a_command_that_nothing_carries_out_ends_the_training(folder: Path) -> None:
    """A control, in the same copy: what ranks do is what stands in their file."""
    give_it_its_line(folder)
    (folder / "penstock" / "engines" / "ranks" / "length_spread.py").unlink()
    done = train(folder)
    assert done.returncode != 0
    assert "count_parameters" in done.stdout + done.stderr
