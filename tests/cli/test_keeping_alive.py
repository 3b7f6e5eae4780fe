"""A command that trains is started again where its process is killed, and where it ends by itself it is over.

Its place is taken by a small program. Whole trainings that are killed and resumed are in tests/flows/test_resume.py.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from penstock.cli import keeping_alive
from penstock.cli.keeping_alive import kept_alive
from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder
from tests.processes import alive
from tests.waiting import until

# Notes how it was called, leaves a child behind, and ends as the next word of the file `ends` says.
TRAINING = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[2:]) + "\\n")
end, _, rest = (folder / "ends").read_text().partition(" ")
(folder / "ends").write_text(rest)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / "children").open("a").write(f"{child.pid}\\n")
run = Path(sys.argv[-1])
(run / "logs").mkdir(exist_ok=True)
if end == "wait":
    (folder / "waits").touch()
    time.sleep(600)
if end != "early":
    (run / "manifest.json").touch()
os.kill(os.getpid(), 9) if end in ("killed", "early") else sys.exit(int(end))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """An empty run folder, and the program in the place of the command line."""
    program = tmp_path / "training.py"
    program.write_text(TRAINING)
    monkeypatch.setattr(keeping_alive, "PROGRAM", (sys.executable, str(program), str(tmp_path)))
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def kept(run: RunFolder, ends: str, restarts: int = 2) -> tuple[int, list[str]]:
    """Keep a training alive that ends so, one time after the other; return its exit code and its command lines."""
    folder = run.path.parent
    (folder / "ends").write_text(ends)
    code = kept_alive(["train", "recipe.yaml", "--run", str(run.path)], run.path, restarts, 60.0)
    assert not any(alive(int(pid)) for pid in (folder / "children").read_text().split())
    lines = (folder / "calls").read_text().splitlines()
    return code, [line.removesuffix(f" {run.path}") for line in lines]


NEW, AGAIN = "train recipe.yaml --run", "train --resume"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_training_that_ends_by_itself_is_over(run: RunFolder, code: int) -> None:
    """Whatever its exit code is; nothing of it is left."""
    assert kept(run, str(code)) == (code, [NEW])
    assert read_events(run) == []


def test_a_killed_training_goes_on(run: RunFolder) -> None:
    """Each time an event says so. One that was killed before there was anything to go on with begins anew."""
    assert kept(run, "early killed 0") == (0, [NEW, NEW, AGAIN])
    (event,) = read_events(run)
    assert (event["event"], event["number"]) == ("FlowLost", 1)
    assert "signal 9 (SIGKILL)" in event["reason"]


def test_more_ends_than_allowed_are_the_end(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command that goes on. Control: one more is allowed, and it is not."""
    assert kept(run, "killed killed killed 0", restarts=2) == (128 + signal.SIGKILL, [NEW, AGAIN, AGAIN])
    said = " ".join(capsys.readouterr().err.split())
    assert f"3 times within 60 s: 'penstock train --resume {run.path}' goes on" in said.replace("\n", "")
    assert kept(run, "killed killed killed 0", restarts=3)[0] == 0


def test_an_end_that_is_asked_for_is_handed_on(run: RunFolder) -> None:
    """SIGTERM reaches the training, which does not begin again."""
    folder = run.path.parent
    before = {process.pid for process in psutil.Process().children()}

    def terminate() -> None:
        until((folder / "waits").exists, 20, "the training waits", 0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=terminate).start()
    assert kept(run, "wait 0") == (128 + signal.SIGTERM, [NEW])
    assert {process.pid for process in psutil.Process().children()} <= before
