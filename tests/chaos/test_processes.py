"""A training's processes are found wherever they have got to, and by what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.chaos.processes import MARK, kind_of, processes_of
from tests.waiting import came_true

# Prints an orphan's pid and, once the process between them has ended, a child's.
GETS_AWAY = """
import os, subprocess, sys
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
if os.fork() == 0:
    os.setsid()
    print(subprocess.Popen(sleep).pid, flush=True)
    os._exit(0)
os.wait()
child = subprocess.Popen(sleep)
print(child.pid, flush=True)
child.wait()
"""


def test_all_that_a_marked_process_started_is_found() -> None:
    """Also what has a session of its own and lost its parent. Control: a process of another mark is not."""
    environment = os.environ | {MARK: "ours"}
    started = subprocess.Popen([sys.executable, "-c", GETS_AWAY], env=environment, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env=os.environ | {MARK: "x"})
    try:
        assert started.stdout is not None
        orphan, child = int(started.stdout.readline()), int(started.stdout.readline())
        # A process that has just been started shows its environment a moment after its parent knows of it.
        ours = {started.pid, orphan, child}
        assert came_true(lambda: {one.process.pid for one in processes_of("ours")} == ours, 10)
    finally:
        for one in [*processes_of("ours"), *processes_of("x")]:
            one.process.kill()
        started.wait(10)
        other.wait(10)
    assert came_true(lambda: not processes_of("ours"), 10)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["python", "-m", "penstock.cli.main", "train", "a.yaml"], "flow"),
        (["python", "-P", "-m", "penstock.engines.groups.host"], "host"),
        (["python", "-P", "-m", "penstock.engines.groups.rank"], "rank"),
        (["python", "-I", "-S", "keeper.py", "1", "session", "29", "python\x1f-m\x1fengines.groups.rank"], "keeper"),
        (["python", "-B", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], "user's code"),
        (
            ["python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(54)"],
            "Python's resource tracker",
        ),
        (["python", "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"], "Prefect's server"),
        (["sh", "-c", 'read -r _; kill "$1"', "sh", "4"], "shell beside it"),
        (["sleep", "600"], "other"),
    ],
)
def test_a_process_is_known_by_its_command_line(words: list[str], kind: str) -> None:
    """As trainings start them."""
    assert kind_of(words) == kind


def test_the_names_are_those_of_our_files() -> None:
    """A file that is renamed would turn its processes into others."""
    assert Path("penstock/engines/groups/host.py").is_file() and Path("penstock/engines/groups/rank.py").is_file()
    assert Path("penstock/usercode/keeper.py").is_file() and psutil.LINUX
