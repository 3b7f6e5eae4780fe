"""A real Prefect server with Penstock deployed on it and a real worker: started, asked, and ended with all below it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.processes import alive, words_of
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
STANDS_STILL_S = 500  # of a command that takes 20 s on two cores; the stacks of all that it waits for are shown then
MOVING = ("created", "updated", "last_polled", "status")  # also by a worker that polls


class Patient(httpx.HTTPTransport):
    """Asks again where the server's database is busy (503), as Prefect's own clients do."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(20):
            response = super().handle_request(request)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            response.close()
            time.sleep(1)
        return response


@dataclass(frozen=True)
class Prefect:
    """A server and a worker of its own, and the environment that finds them."""

    api: httpx.Client
    environment: dict[str, str]
    worker: psutil.Process
    runs: Path

    def parameters(self, name: str, **config: Any) -> dict[str, Any]:
        """Return what the form sends for a run in the folder `name`, with keys of its advanced section."""
        tree = {"folder": str(self.runs), "data": {"arithmetic": {"heldout": 50}}}
        return {"config": {**tree, **config}, "run_folder": str(self.runs / name)}

    def trigger(self, deployment: str, parameters: dict[str, Any], *tags: str) -> httpx.Response:
        """Ask for a run."""
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        wanted = {"parameters": parameters, "tags": tags}
        return self.api.post(f"/deployments/{found['id']}/create_flow_run", json=wanted)

    def cancel(self, run: str) -> None:
        """Ask for the end of a run, as the button does."""
        cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        self.api.post(f"/flow_runs/{run}/set_state", json=cancelling).raise_for_status()

    def start(self, deployment: str, parameters: dict[str, Any], *tags: str) -> str:
        """Ask for a run that must be accepted; return its id."""
        return str(self.trigger(deployment, parameters, *tags).raise_for_status().json()["id"])

    def occupied(self, limit: str) -> int:
        """Return how many slots of a concurrency limit are held."""
        return int(self.api.get(f"/v2/concurrency_limits/{limit}").raise_for_status().json()["active_slots"])

    def runs_at_once(self, deployment: str) -> int:
        """Return how many runs of a deployment may go on at a time."""
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        return int(found["global_concurrency_limit"]["limit"])

    def state(self, run: str) -> str:
        """Return the name of the run's state."""
        return str(self.api.get(f"/flow_runs/{run}").raise_for_status().json()["state"]["name"])

    def message(self, run: str) -> str:
        """Return what the run's page says of its state."""
        return str(self.api.get(f"/flow_runs/{run}").raise_for_status().json()["state"]["message"])

    def heartbeats(self, run: str) -> int:
        """Return how many signs of life of the run the server knows."""
        of_run = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
        return int(self.api.post("/events/filter", json={"filter": of_run}).raise_for_status().json()["total"])

    def everything(self) -> dict[str, dict[str, Any]]:
        """Return pools, limits, automations and deployments, without times and without who is online.

        By id; automations by name, since Prefect makes those of triggers anew.
        """
        kinds = ("work_pools", "v2/concurrency_limits", "deployments")
        lists = [self.api.post(f"/{kind}/filter", json={}).raise_for_status().json() for kind in kinds]
        found = {item["id"]: _without(item, MOVING) for items in lists for item in items}
        automations = self.api.post("/automations/filter", json={}).raise_for_status().json()
        return found | {item["name"]: _without(item, (*MOVING, "id")) for item in automations}

    def finished_tasks(self, run: str) -> set[str]:
        """Return the names of the tasks that are complete in the child flows of a run."""
        children = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
        found = self.api.post("/task_runs/filter", json=children).raise_for_status().json()
        return {item["name"] for item in found if item["state_type"] == "COMPLETED"}

    def flow_process(self) -> psutil.Process:
        """Return the process of the one flow run that the worker executes now."""
        (process,) = [child for child in self.worker.children() if "prefect.engine" in words_of(child)]
        return process

    def variable(self, name: str) -> Any:
        """Return the value of a Variable, None if there is none."""
        found = self.api.get(f"/variables/name/{name}")
        return None if found.status_code == httpx.codes.NOT_FOUND else found.raise_for_status().json()["value"]

    def edit(self, name: str, value: Any) -> None:
        """Change a Variable as the page does."""
        self.api.patch(f"/variables/name/{name}", json={"value": value}).raise_for_status()

    def logged(self, text: str, run: str | None = None) -> bool:
        """Whether a run, or any, has logged an error with such a text."""
        errors: dict[str, Any] = {"level": {"ge_": logging.ERROR}} | ({"flow_run_id": {"any_": [run]}} if run else {})
        return any(text in line["message"] for line in self.api.post("/logs/filter", json={"logs": errors}).json())

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes below the worker."""
        return [child for child in self.worker.children(recursive=True) if _is_rank(child)]


def _without(value: Any, names: Sequence[str]) -> Any:
    """Drop keys at any depth."""
    if isinstance(value, list):
        return [_without(item, names) for item in value]
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return value


def _is_rank(process: psutil.Process) -> bool:
    return "penstock.engines.groups.rank" in words_of(process)


def penstock(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a person does; one that stands still is ended with the stacks of its threads."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said, errors = process.communicate(timeout=STANDS_STILL_S)
        except subprocess.TimeoutExpired:
            below = psutil.Process(process.pid).children(recursive=True)
            names = [" ".join(words_of(child)) for child in below]
            for stuck in (*below, psutil.Process(process.pid)):
                with suppress(psutil.NoSuchProcess):
                    stuck.send_signal(signal.SIGABRT)
            said, errors = process.communicate()
            errors = f"{command} stood still, with {names} below it:\n{errors}"
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


@contextmanager
def served(home: Path, runs: Path, **variables: str) -> Iterator[Prefect]:
    """Start a server on a free port, Penstock deployed on it, and a worker; every process is gone afterwards.

    Args:
        home: of Prefect, with its database and logs.
        runs: gets the run folders.
        variables: of all processes, over those of this one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # Of a short schedule a few runs at a time: a hundred are more than SQLite takes beside a worker that asks.
        "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "4",
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "1",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "20",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        **variables,
    }
    processes: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *arguments: str, module: str = "prefect") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *arguments]
        with (home / f"{name}.log").open("wb") as log:
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
        processes.append(started)
        return started

    try:
        with httpx.Client(base_url=environment["PREFECT_API_URL"], timeout=120, transport=Patient()) as api:
            server = begin("server", "127.0.0.1", str(port), module="penstock.cli.prefect.own_server")
            until(lambda: answers(api), 120, "the server answers")
            deployed = penstock(environment, "deploy")
            if deployed.returncode:
                server.send_signal(signal.SIGABRT)
                server.wait()
                log = (home / "server.log").read_text(encoding="utf-8", errors="replace")
                pytest.fail(f"{deployed.stderr}\nThe server:\n{log[-8000:]}")
            worker = begin("worker", "worker", "start", "--pool", "penstock")
            yield Prefect(api, environment, psutil.Process(worker.pid), runs)
    finally:
        _end(processes)


def answers(api: httpx.Client) -> bool:
    try:
        return api.get("/health").is_success
    except httpx.TransportError:
        return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill all: in order a server would take its time to end."""
    everyone = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
    for process in processes:
        process.kill()
        process.wait(20)
    for child in everyone:
        if alive(child):
            child.kill()
