"""`penstock sweep` and `penstock compare` from the command line: every command of docs/comparing.md, and refusals."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.base.errors import UserError
from penstock.cli.app import app
from penstock.cli.prefect import server
from penstock.flows import sweep as flow
from penstock.session.sweeps.running import TrainingsFailed
from penstock.session.sweeps.trainings import Ended
from penstock.state.sweep import SweepFolder, read_sweep
from penstock.trackers.mlflow import MlflowTracker, default_tracking_uri
from penstock.trackers.tracker import NewRun
from tests.delivering import begun, log_iteration
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("penstock ")
]
OLD_SWEEP = "runs/quickstart-sweep-20260115-101500"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A working folder with the recipes and two recorded runs; what the flow of sweeps is asked for, and not done."""
    calls: list[dict[str, Any]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(server, "check_server", lambda: None)
    monkeypatch.setattr(server, "start_server", lambda: None)
    monkeypatch.setattr(flow, "sweep", lambda **parameters: calls.append(parameters))
    Path("configs").symlink_to(ROOT / "configs")
    for number, name in enumerate(("sums-a", "sums-b")):
        tracker = MlflowTracker(begun(default_tracking_uri(Path("runs")), "other", "other").uri)
        tracker.open(NewRun(name, "penstock", {"penstock.run": str(tmp_path / "runs" / name)}))
        tracker.configure({"seed": "0", "actor.lr": f"{number + 1}e-06"})
        log_iteration(tracker, 1, {"reward/mean": number / 2})
        samples = tmp_path / "runs" / name / "samples" / "000001.json"
        samples.parent.mkdir(parents=True)
        samples.write_text(f'{{"columns": ["prompt", "response", "reward"], "data": [["1+1=", "from {name}", 1.0]]}}')
    return calls


@pytest.fixture
def run(asked: list[dict[str, Any]]) -> Callable[[str], Result]:
    """Run a command line."""
    return lambda line: CliRunner(env={"COLUMNS": "140"}).invoke(app, shlex.split(line)[1:])


def test_the_page_has_commands() -> None:
    """The control of the next test: comparisons and sweeps, a grid, a draw and a resume."""
    assert len(COMMANDS) == 8
    assert sum(" --resume " in line for line in COMMANDS) == sum("--random" in line for line in COMMANDS) == 1


@pytest.mark.parametrize("line", [line for line in COMMANDS if "--resume" not in line])
def test_a_command_of_the_page_does_what_it_says(
    line: str, run: Callable[[str], Result], asked: list[dict[str, Any]]
) -> None:
    """A comparison shows both runs; a sweep is planned, checked, and given to its flow with the folder that has it."""
    done = run(line)
    assert done.exit_code == 0, done.exception
    if line.startswith("penstock compare"):
        assert "sums-a" in done.output and "sums-b" in done.output and "files: " in done.output
        assert ("from sums-a" in done.output) == ("--samples" in line)
        return
    (call,) = asked
    sweep = read_sweep(SweepFolder(Path(call["resume"])))
    numbers = {"1e-4": 6, "--random": 16, "rloo": 6, "adamw,sgd": 6}
    assert len(sweep.trainings) == next(count for word, count in numbers.items() if word in line)
    assert sweep.by == ("reward/mean" if "--by" in line else "heldout/accuracy")


def test_the_pages_resume_goes_on_with_the_sweep(run: Callable[[str], Result], asked: list[dict[str, Any]]) -> None:
    """From its folder alone. Control: there is none yet, which is said."""
    (line,) = [line for line in COMMANDS if "--resume" in line]
    assert isinstance(run(line).exception, UserError)
    run("penstock sweep configs/quickstart.yaml seed=0,1")
    Path(asked[0]["resume"]).rename(OLD_SWEEP)
    done = run(line)
    assert done.exit_code == 0 and f"sweep: {OLD_SWEEP}" in done.output
    assert asked[1] == {"resume": str(Path(OLD_SWEEP).resolve()), "at_once": None}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("penstock sweep", "no recipe given"),
        ("penstock sweep absent.yaml seed=0,1", "absent.yaml does not exist"),
        ("penstock sweep configs/quickstart.yaml", "a sweep of nothing"),
        ("penstock sweep configs/quickstart.yaml rollout.samples=8,0", "rollout.samples=0: "),
        (
            "penstock sweep configs/quickstart.yaml rollout.prompts=128,1 algorithm.mini_batches=16",
            "rollout.prompts=1: ",
        ),
        ("penstock sweep configs/quickstart.yaml seed=0,1 --by 'a b'", "--by 'a b' is no figure"),
        ("penstock sweep configs/quickstart.yaml --resume runs", "remove the recipe and settings"),
        ("penstock sweep --resume runs", "holds no sweep"),
        ("penstock compare penstock --against sums-c", "'sums-c' is not among the runs compared"),
    ],
)
def test_mistakes_are_said_before_anything_begins(
    line: str, problem: str, run: Callable[[str], Result], asked: list[dict[str, Any]]
) -> None:
    """In one message with what to do, and no folder is made. Controls: the commands above."""
    before = sorted(Path().rglob("*"))
    done = run(line)
    assert isinstance(done.exception, UserError)
    assert problem in str(done.exception) and done.exception.remedy
    assert (asked, sorted(Path().rglob("*"))) == ([], before)


def test_failed_trainings_are_exit_code_1(
    run: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With their names, and how to go on. Control: all the sweeps above end with 0."""

    def fail(resume: str, **_: Any) -> None:
        folder = SweepFolder(Path(resume))
        raise TrainingsFailed(folder, [Ended(read_sweep(folder).trainings[1].name, "run", 1, 2.0, "its last words")])

    monkeypatch.setattr(flow, "sweep", fail)
    done = run("penstock sweep configs/quickstart.yaml seed=0,1")
    assert done.exit_code == 1
    said = done.output + capfd.readouterr().err
    assert "1 of 2 trainings failed:" in said and "2-seed-1 (exit code 1)" in said
    assert "Continue with: penstock sweep --resume runs/quickstart-sweep-" in said
