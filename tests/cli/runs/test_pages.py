"""`penstock ui`: the pages of past runs, and what it says where it cannot show them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from rich.console import Console

from penstock.base.errors import UserError
from penstock.cli.runs import pages
from penstock.cli.runs.pages import check_port, pages_of_run, serve_pages, wait_for
from tests.processes import alive
from tests.waiting import came_true

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("option", ["--tracker-port", "--prefect-port"])
def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, option: str) -> None:
    """Either of both, with the option to name another. Control: the port is free again."""
    (tmp_path / "mlflow.db").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        taken, free = first.getsockname()[1], second.getsockname()[1]
        second.close()
        ports = (taken, free) if option == "--tracker-port" else (free, taken)
        with pytest.raises(UserError, match=f"port {taken} cannot be used") as caught:
            serve_pages(tmp_path, *ports, Console())
        assert option in caught.value.remedy
    check_port(taken, option)


def test_a_server_that_ends_by_itself_is_named() -> None:
    """With its code. The control is the other one, which runs on."""
    running, ended = (
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds}); raise SystemExit(3)"])
        for seconds in (600, 0)
    )
    try:
        with pytest.raises(UserError, match=re.escape("Prefect's server ended with code 3")):
            wait_for({"MLflow": running, "Prefect": ended})
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
def test_no_server_outlives_a_signal_in_its_first_moments(tmp_path: Path) -> None:
    """As from `timeout` or systemd, right after both were started; no password is in their command lines.

    Prefect's server asks for one, which the command says.
    """
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    MlflowClient(address)
    ports = [_free_port(), _free_port()]
    command = [sys.executable, "-m", "penstock.cli.main", "ui", str(tmp_path)]
    command += ["--tracker-port", str(ports[0]), "--prefect-port", str(ports[1])]
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect"), "MLFLOW_TRACKING_URI": address}
    process = psutil.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert came_true(lambda: len(process.children()) == 2, 60)
    servers = process.children()
    said = [process.stdout.readline() for _ in range(2)][1]
    password = servers[1].environ()["PREFECT_SERVER_API_AUTH_STRING"]
    assert f"http://127.0.0.1:{ports[1]}   password {password}\n" in said
    secret = (address, password)
    assert not any(text in argument for server in servers for argument in server.cmdline() for text in secret)
    process.terminate()
    assert process.wait(60) == 0
    assert not [server for server in servers if alive(server)]


def test_nothing_starts_where_the_runs_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since who would end it? The control is the test above: else both servers start."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(pages, "_start", lambda *_: pytest.fail("a server is started"))
    (tmp_path / "mlflow.db").write_text("no database at all, and longer than a header of one " * 4)
    with pytest.raises(Exception, match="not a database"):
        serve_pages(tmp_path, _free_port(), _free_port(), Console())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_runs_pages_are_on_the_servers_of_the_environment() -> None:
    """Without their passwords. Controls: without a server the command that starts both; without a tracker no line."""

    def summary(address: str) -> dict[str, Any]:
        tracked = {"tracker": "mlflow", "run": "m", "label": "MLflow", "address": address}
        return {"tracked": [tracked], "prefect_flow_run_id": "p"}

    with temporary_settings({PREFECT_API_URL: None, PREFECT_UI_URL: None}):
        assert pages_of_run(summary("sqlite:////elsewhere/mlflow.db"), "penstock ui runs") == {
            "MLflow": "penstock ui runs   then http://127.0.0.1:5000   run m",
            "Prefect": "penstock ui runs   then http://127.0.0.1:4200/runs/flow-run/p",
        }
    with temporary_settings({PREFECT_API_URL: "https://me:sesame@prefect.corp/api", PREFECT_UI_URL: None}):
        assert pages_of_run(summary("https://mlflow.corp"), "penstock ui runs") == {
            "MLflow": "https://mlflow.corp   run m",
            "Prefect": "https://prefect.corp/runs/flow-run/p",
        }
        assert pages_of_run({"tracked": [], "prefect_flow_run_id": "p"}, "penstock ui runs") == {
            "Prefect": "https://prefect.corp/runs/flow-run/p",
        }
