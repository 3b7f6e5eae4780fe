"""`penstock ui`: the pages of past runs, and what it says where it cannot show them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console

from configs.errors import UserError
from penstock.pages import check_port, runs_page, serve_pages, wait_for


@pytest.mark.parametrize("option", ["--mlflow-port", "--prefect-port"])
def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, option: str) -> None:
    """Either of both, with the option to name another. Control: the port is free again."""
    (tmp_path / "mlflow.db").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        taken, free = first.getsockname()[1], second.getsockname()[1]
        second.close()
        ports = (taken, free) if option == "--mlflow-port" else (free, taken)
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


def test_the_page_is_that_of_the_newest_runs_experiment(tmp_path: Path) -> None:
    """MLflow's own store says which. Control: a store without runs has none."""
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    older, newer = (client.create_experiment(name) for name in ("older", "newer"))
    assert runs_page(tmp_path) == ""
    client.create_run(newer, start_time=2)
    client.create_run(older, start_time=1)
    assert runs_page(tmp_path) == f"/#/experiments/{newer}"
