"""Serves the pages of past runs: MLflow's on the runs' database, Prefect's on its own. Loopback only."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from configs.errors import UserError
from reports.mlflow_run import default_tracking_uri


def serve_pages(folder: Path, mlflow_port: int, prefect_port: int, console: Console) -> None:
    """Start both servers and wait until Ctrl-C or until one of them ends.

    Raises:
        UserError: there are no runs in `folder`.
    """
    if not (folder / "mlflow.db").is_file():
        raise UserError(
            f"{folder} holds no recorded runs (no mlflow.db)", "name the directory that holds the run folders"
        )
    python = [sys.executable, "-m"]
    mlflow = [*python, "mlflow", "ui", "--backend-store-uri", default_tracking_uri(folder)]
    prefect = [*python, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
    servers = [
        subprocess.Popen([*mlflow, "--host", "127.0.0.1", "--port", str(mlflow_port)], stdout=subprocess.DEVNULL),
        subprocess.Popen(prefect, stdout=subprocess.DEVNULL),
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
