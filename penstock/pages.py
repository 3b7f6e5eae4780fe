"""Serves the pages of past runs: MLflow's on the runs' database, Prefect's on its own. Loopback only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from configs.errors import UserError
from reports.mlflow_run import default_tracking_uri


def serve_pages(folder: Path, mlflow_port: int, prefect_port: int, console: Console) -> None:
    """Start both servers and wait until Ctrl-C, SIGTERM or the end of one of them; neither outlives this call.

    Raises:
        UserError: there are no runs in `folder`.
    """
    if not (folder / "mlflow.db").is_file():
        raise UserError(
            f"{folder} holds no recorded runs (no mlflow.db)", "name the directory that holds the run folders"
        )
    mlflow = ["mlflow", "ui", "--backend-store-uri", default_tracking_uri(folder), "--port", str(mlflow_port)]
    mlflow += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    prefect = ["prefect", "server", "start", "--port", str(prefect_port)]
    signal.signal(signal.SIGTERM, _interrupt)
    servers = [
        # Jobs are for MLflow's evaluations of applications: seven processes that nothing here uses.
        _start(mlflow, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}),
        # Without it the page asks port 4200 for its data, whatever port it is served from.
        _start(prefect, {"PREFECT_UI_API_URL": f"http://127.0.0.1:{prefect_port}/api"}),
    ]
    console.print(
        f"MLflow   http://127.0.0.1:{mlflow_port}\nPrefect  http://127.0.0.1:{prefect_port}\nCtrl-C ends both."
    )
    try:
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("ending")
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(timeout=30)


def _start(command: list[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--host", "127.0.0.1"],
        env=dict(os.environ) | settings,
        stdout=subprocess.DEVNULL,
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
