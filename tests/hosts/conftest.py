"""A cluster: a Prefect server and a worker for flows on this machine, and two machines with a worker of a pool each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.flows.deployments.prefect_server import Patient, answers
from tests.hosts.machines import PREFECT, ROOT, Machine, network
from tests.processes import environment_of, words_of
from tests.waiting import came_true, until

POOL, FLOWS = "machines", "flows"
OWN_SERVER = "penstock.cli.prefect.own_server"
TINY: dict[str, Any] = {
    "base": "configs/quickstart.yaml",
    "iterations": 2,
    "sft": {"steps": 20, "optimizer": {"warmup_steps": 2}},
    "data": {"arithmetic": {"sft": 500, "train": 200, "heldout": 40}},
    "rollout": {"prompts": 16, "samples": 4},
    "evaluate": {"every": 2},
    "checkpoint": {"every": 2},
}


def as_asked(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the flow `train` for a tree: its recipe, and in the advanced section the rest."""
    return {"recipe": tree["base"], "config": {key: value for key, value in tree.items() if key != "base"}}


@dataclass
class Server:
    """The Prefect server, which can be killed and started again at the same address, with what it knew.

    Attributes:
        begin: starts it.
        answers: whether it does.
        process: of this moment.
    """

    begin: Callable[[], subprocess.Popen[bytes]]
    answers: Callable[[], bool]
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """SIGKILL it with all that it has started."""
        _end([self.process])

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = self.begin()
        until(self.answers, 120, "the server answers")


@dataclass
class Cluster:
    """A server, this machine's worker, and the machines of a pool with theirs."""

    api: httpx.Client
    environment: dict[str, str]
    address: str
    machines: list[Machine]
    home: Path
    workers: dict[str, subprocess.Popen[bytes]]
    server: Server
    asked_for: list[str] = field(default_factory=list)  # runs

    def config(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return a training over both machines, one CPU rank on each."""
        group = {"pool": POOL, "hosts": len(self.machines), "ranks": 1, "roles": ["actor", "rollout"]}
        return {
            **TINY,
            "folder": str(self.home / "runs"),
            "name": name,
            "groups": {"main": group},
            "hosts": {"address": self.address, "silence_s": 5, "interface": "eth0"},
            **changes,
        }

    def start(self, config: dict[str, Any], folder: str) -> str:
        """Ask for a training as the form does; return the run's id."""
        found = self.api.get("/deployments/name/train/quickstart").raise_for_status().json()
        parameters = {**as_asked(config), "run_folder": str(self.home / "runs" / folder)}
        asked = self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})
        self.asked_for.append(str(asked.raise_for_status().json()["id"]))
        return self.asked_for[-1]

    def run(self, run: str) -> dict[str, Any]:
        """Return a flow run as the server has it."""
        return dict(self.api.get(f"/flow_runs/{run}").raise_for_status().json())

    def state(self, run: str) -> str:
        """Return the name of a run's state."""
        return str(self.run(run)["state"]["name"])

    def until(self, condition: Callable[[], Any], within_s: float) -> None:
        """Wait for a condition; where it does not come true, tell what the workers said."""
        assert came_true(condition, within_s), self.last_words()

    def ends(self, run: str, within_s: float = 240) -> str:
        """Wait for the end of a run and return its state."""
        self.until(lambda: self.run(run)["state"]["type"] in ENDS, within_s)
        return self.state(run)

    def hosts_of(self, run: str) -> list[dict[str, Any]]:
        """Return the runs of a training's hosts."""
        below = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
        found = self.api.post("/flow_runs/filter", json=below).raise_for_status().json()
        return sorted((item for item in found if item["work_pool_name"] == POOL), key=lambda item: item["name"])

    def hosts_end(self, run: str, within_s: float = 60) -> None:
        """Wait until the runs of a training's hosts have ended."""
        until(lambda: all(host["state"]["type"] in ENDS for host in self.hosts_of(run)), within_s, "its hosts end")

    def slots_taken(self) -> int:
        """Return how many GPU slots of the pool are held."""
        limit = self.api.get(f"/v2/concurrency_limits/gpus-{POOL}").raise_for_status().json()
        return int(limit["active_slots"])

    def set_state(self, run: str, kind: str) -> None:
        """Ask for a state, as a button of the UI does."""
        wanted = {"state": {"type": kind, "name": kind.capitalize()}}
        self.api.post(f"/flow_runs/{run}/set_state", json=wanted).raise_for_status()

    def ranks(self) -> list[psutil.Process]:
        """Return all rank processes of the machines."""
        return [process for machine in self.machines for process in machine.processes("penstock.engines.groups.rank")]

    def penstock(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line on this machine."""
        command = [sys.executable, "-m", "penstock.cli.main", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=240
        )

    def start_worker(self, machine: Machine) -> None:
        """Start the worker of a machine, which takes one host at a time."""
        words = [*PREFECT, "worker", "start", "--pool", POOL, "--limit", "1", "--name", machine.name]
        self.workers[machine.name] = machine.start(words, self.environment, self.home / f"{machine.name}.log")

    def online(self) -> int:
        """Return how many workers of the pool are online."""
        found = self.api.post(f"/work_pools/{POOL}/workers/filter", json={}).raise_for_status().json()
        return sum(worker["status"] == "ONLINE" for worker in found)

    def heartbeat(self, machine: Machine) -> str:
        """Return when the server last heard of a machine's worker, which stays online for a while after its end."""
        found = self.api.post(f"/work_pools/{POOL}/workers/filter", json={}).raise_for_status().json()
        return str(next(worker["last_heartbeat_time"] for worker in found if worker["name"] == machine.name))

    def last_words(self) -> str:
        """Return the end of what the workers said."""
        return "\n".join(
            path.read_text(errors="replace")[-1500:]
            for path in sorted(self.home.glob("*.log"))
            if path.stem != "server"
        )


ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two machines, deployed and online; nothing of it is left afterwards."""
    home = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        address, machines = stack.enter_context(network(2))
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        environment = inherited | {
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"http://{address}:{port}/api",
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)

        def begin(name: str, *words: str, module: str = "prefect") -> subprocess.Popen[bytes]:
            with (home / f"{name}.log").open("ab") as log:
                command = [sys.executable, "-m", module, *words]
                one = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
                )
            started.append(one)
            return one

        api = stack.enter_context(
            httpx.Client(base_url=environment["PREFECT_API_URL"], timeout=30, transport=Patient())
        )
        serve = partial(begin, "server", address, str(port), module=OWN_SERVER)
        server = Server(serve, partial(answers, api), serve())
        until(server.answers, 120, "the server answers")
        cluster = Cluster(api, environment, address, machines, home, {}, server)
        stack.callback(lambda: _end(list(cluster.workers.values())))
        for arguments in (("deploy", "--pool", FLOWS), ("deploy", "--pool", POOL, "--hosts", "2")):
            done = cluster.penstock(*arguments)
            assert done.returncode == 0, done.stderr
        begin("flows", "worker", "start", "--pool", FLOWS)
        for machine in machines:
            cluster.start_worker(machine)
        until(lambda: cluster.online() == 2, 120, "both machines are online")
        yield cluster


@pytest.fixture(autouse=True)
def _none_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a test that failed has left running: it would hold the machines that the next one waits for."""
    yield
    if "cluster" not in request.fixturenames:
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    for run in cluster.asked_for:
        for process in flow_of(run):
            process.kill()
    until(lambda: not cluster.ranks(), 60, "its hosts end its ranks")
    cluster.asked_for.clear()


def flow_of(run: str) -> list[psutil.Process]:
    """Return the process in which a worker has started a flow run, if there is one."""
    flows = (process for process in psutil.process_iter() if _is_flow(process))
    return [process for process in flows if environment_of(process).get("PREFECT__FLOW_RUN_ID") == run]


def _is_flow(process: psutil.Process) -> bool:
    return any(word.startswith(("prefect.flow_engine", "prefect.engine")) for word in words_of(process))


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in [process, *below]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        process.wait(20)
