"""Serves the pages of past runs: MLflow's on the runs' database, Prefect's on its own. Loopback only."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.base.errors import UserError
from penstock.base.interrupts import interrupts_deferred
from penstock.cli.prefect.server import password_settings
from penstock.trackers.mlflow import connect, default_tracking_uri, public_uri, without_password


def serve_pages(folder: Path, mlflow_port: int, prefect_port: int, console: Console) -> None:
    """Start both servers and wait until Ctrl-C, SIGTERM or the end of one of them; neither outlives this call.

    Raises:
        UserError: there are no runs in `folder`, a port is taken, or a server ended by itself.
    """
    if not (folder / "mlflow.db").is_file():
        raise UserError(
            f"{folder} holds no recorded runs (no mlflow.db)", "name the directory that holds the run folders"
        )
    check_port(mlflow_port, "--mlflow-port")
    check_port(prefect_port, "--prefect-port")
    runs, flows = f"http://127.0.0.1:{mlflow_port}{runs_page(folder)}", f"http://127.0.0.1:{prefect_port}"
    mlflow = ["mlflow", "ui", "--port", str(mlflow_port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    about_mlflow = {
        "MLFLOW_BACKEND_STORE_URI": without_password(default_tracking_uri(folder)),  # others can read a command line
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # for evaluations of applications: seven unused processes
        "PYTHONWARNINGS": "ignore",
    }
    prefect = ["prefect", "server", "start", "--port", str(prefect_port)]
    # Without it the page asks port 4200 for its data, whatever port it is served from.
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or secrets.token_urlsafe(12)
    about_prefect = {"PREFECT_UI_API_URL": f"{flows}/api"} | password_settings(password)
    signal.signal(signal.SIGTERM, _interrupt)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with interrupts_deferred():  # or one that has started and is not in the list yet would stay
            servers["MLflow"] = _start(mlflow, about_mlflow)
            servers["Prefect"] = _start(prefect, about_prefect)
        asked = f"Prefect  {flows}   password {password}"  # its pages can change a running training
        console.print(f"MLflow   {runs}\n{asked}\nCtrl-C ends both.", highlight=False, soft_wrap=True)
        wait_for(servers)
    except KeyboardInterrupt:
        console.print("ending")
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(timeout=30)


def check_port(port: int, option: str) -> None:
    """Refuse a port on which this process cannot listen.

    Raises:
        UserError: names the option for another.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise UserError(f"port {port} cannot be used: {error.strerror}", f"name another with {option}") from error


def wait_for(servers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until one of the servers, which nobody told to end, has ended.

    Raises:
        UserError: says which.
    """
    while True:
        for name, server in servers.items():
            if server.poll() is not None:
                raise UserError(f"{name}'s server ended with code {server.returncode}", "its own messages are above")
        time.sleep(0.5)


def runs_page(folder: Path) -> str:
    """Return the part of MLflow's address that shows the experiment of the newest run; empty where there is none.

    The query opens MLflow's pages for training; its default are those for applications, which show no runs.
    """
    client = connect(default_tracking_uri(folder))
    experiments = [item.experiment_id for item in client.search_experiments()]
    newest = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    page = "/#/experiments/{}/runs?workflowType=machine_learning"
    return page.format(newest[0].info.experiment_id) if newest else ""


def pages_of_run(summary: Mapping[str, Any], ui: str) -> dict[str, str]:
    """Return where MLflow and Prefect show a run: on the servers of the environment, else once `ui` has started them.

    Args:
        summary: the run's.
        ui: the command that serves the pages.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL

    store = os.environ.get("MLFLOW_TRACKING_URI", "")
    mlflow = public_uri(store) if store.startswith("http") else f"{ui}   then http://127.0.0.1:5000"
    server = PREFECT_UI_URL.value() or (PREFECT_API_URL.value() or "").removesuffix("/api")
    prefect = public_uri(server.rstrip("/")) if server else f"{ui}   then http://127.0.0.1:4200"
    return {
        "MLflow": f"{mlflow}   run {summary['mlflow_run_id']}",
        "Prefect": f"{prefect}/runs/flow-run/{summary['prefect_flow_run_id']}",
    }


def _start(command: list[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--host", "127.0.0.1"],
        env=dict(os.environ) | settings,
        stdout=subprocess.DEVNULL,
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
