"""Prefect's temporary server ends with its command, whatever ends the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
import sys, time
from penstock.server import start_server
start_server()
from prefect.server.api.server import SubprocessASGIServer
print(SubprocessASGIServer().server_process.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
from penstock.server import end_with_this_process
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[1] == "guarded":
    keep = end_with_this_process(child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(process: psutil.Process) -> bool:
    """A zombie is gone: whoever adopted it has not collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for `condition`; return whether it came true."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def start(code: str, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start Python on `code`; return it and the process whose id it prints first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_is_watched_ends_with_its_parent(number: signal.Signals) -> None:
    """Also where the parent can run nothing any more. Control: the next test."""
    parent, child = start(PARENT, "guarded")
    assert not gone(child)
    parent.send_signal(number)
    parent.wait(10)
    assert until(lambda: gone(child), 10)


def test_a_child_that_is_not_watched_stays() -> None:
    """The control: nothing else in these tests ends an orphan."""
    parent, child = start(PARENT, "alone")
    parent.kill()
    parent.wait(10)
    try:
        assert not until(lambda: gone(child), 0.5)
    finally:
        child.kill()


def test_no_server_outlives_a_killed_command(tmp_path: Path) -> None:
    """SIGKILL of a command whose temporary server is up and answers."""
    settings = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    command, server = start(COMMAND, **settings)
    assert "uvicorn" in " ".join(server.cmdline())
    assert not gone(server)
    command.kill()
    command.wait(10)
    assert until(lambda: gone(server), 20)
