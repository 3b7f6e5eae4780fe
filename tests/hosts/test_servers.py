"""A training runs through the servers of deploy/compose.yaml, from Debian's packages instead of Docker's images.

Commands, variables and health checks are those of the file.

They run in a network namespace, in which the names of containers are those of its loopback interface; ports are the
file's own. What takes the place of images and volumes is said here: programs of this machine, folders of the test.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hosts.compose import DEPLOY, Service, example, service, services
from tests.hosts.conftest import ENDS, TINY, _end, as_asked
from tests.hosts.machines import ROOT, Machine, network
from tests.waiting import until

POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), None)
MISSING = [
    package
    for package, there in (("postgresql", POSTGRES), ("redis-server", shutil.which("redis-server")))
    if there is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"apt-get install {' '.join(MISSING)}"),
]
PYTHON = {"prefect": [sys.executable, "-m", "prefect"], "mlflow": [sys.executable, "-m", "mlflow"]}
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]


@dataclass
class Servers:
    """The machine with the servers, and how they are asked."""

    machine: Machine
    home: Path
    values: Mapping[str, str]
    started: list[subprocess.Popen[bytes]]

    def service(self, name: str) -> Service:
        """Return a service of the file, with folders of the test for those of containers."""
        folders = {
            "/tmp/": f"{self.home}/",
            "/data": str(self.home / "redis"),
            "/penstock/runs": str(self.home / "artifacts"),
        }
        return service(name, self.values, folders)

    def environment(self, name: str) -> dict[str, str]:
        """Return this machine's variables, and over them those of a service."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        own = {"PREFECT_HOME": str(self.home / "prefect"), "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(self.home / "res")}
        here = {"PENSTOCK_HOME": str(ROOT), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}
        asks_soon = {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        return kept | own | asks_soon | self.service(name).environment | here

    def start(self, name: str, words: Sequence[str] | None = None) -> None:
        """Start a service, or what stands in its place, and wait until its health check of the file is content."""
        first, *rest = words or self.service(name).words
        command = [*PYTHON.get(first, [first]), *rest]
        self.started.append(self.machine.start(command, self.environment(name), self.home / f"{name}.log"))
        until(lambda: self._is_well(name), 180, f"{name} is well: {self.said(name)}", every_s=1.0)

    def _is_well(self, name: str) -> bool:
        assert self.started[-1].poll() is None, self.said(name)
        health = self.service(name).health
        return not health or self.run(name, health, check=False).returncode == 0

    def run(self, name: str, words: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command where the servers are, with the variables of a service."""
        first, *rest = words
        stands_for = PYTHON | {"python": [sys.executable], "pg_isready": [f"{POSTGRES}/pg_isready"]}
        command = self.machine.command([*stands_for.get(first, [first]), *rest])
        environment = self.environment(name)
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=check, timeout=240
        )

    def count(self, database: str, table: str) -> int:
        """Return how many rows a table of PostgreSQL has."""
        words = ["env", f"PGPASSWORD={self.values['POSTGRES_PASSWORD']}", f"{POSTGRES}/psql", "-h", "127.0.0.1"]
        asked = [*words, "-U", "penstock", "-At", "-c", f"SELECT count(*) FROM {table}", database]
        return int(self.run("postgres", asked).stdout)

    def said(self, name: str) -> str:
        """Return the end of a service's log."""
        return (self.home / f"{name}.log").read_text(errors="replace")[-2000:]

    def start_postgres(self) -> None:
        """Do what the image does: make a server's folder with the file's user, and run the scripts beside the file."""
        folder, secret = self.home / "postgres", self.home / "secret"
        folder.mkdir()
        secret.write_text(self.values["POSTGRES_PASSWORD"])
        for path in (folder, secret):
            shutil.chown(path, "postgres", "postgres")
        asked = self.service("postgres").environment
        made = ["-D", str(folder), "-U", asked["POSTGRES_USER"], f"--pwfile={secret}", "-A", "scram-sha-256", "-N"]
        self.run("postgres", [*AS_POSTGRES, f"{POSTGRES}/initdb", *made])
        words = [*AS_POSTGRES, f"{POSTGRES}/postgres", "-D", str(folder), "-k", str(folder), "-F"]
        self.started.append(self.machine.start(words, self.environment("postgres"), self.home / "postgres.log"))
        ready = [f"{POSTGRES}/pg_isready", "-h", "127.0.0.1"]
        until(lambda: not self.run("postgres", ready, check=False).returncode, 60, "PostgreSQL answers")
        login = ["env", f"PGPASSWORD={asked['POSTGRES_PASSWORD']}", f"{POSTGRES}/psql", "-h", "127.0.0.1"]
        login += ["-U", asked["POSTGRES_USER"], "-v", "ON_ERROR_STOP=1"]
        self.run("postgres", [*login, "-c", f"CREATE DATABASE {asked['POSTGRES_DB']}", "postgres"])
        for script in sorted((DEPLOY / "postgres").iterdir()):
            self.run("postgres", [*login, "-f", str(script), asked["POSTGRES_DB"]])
        until(lambda: self._is_well("postgres"), 60, "the file's health check agrees")

    def stop_postgres(self) -> None:
        """Let it take back its shared memory, which outlives a process that is killed."""
        stop = [*AS_POSTGRES, f"{POSTGRES}/pg_ctl", "stop", "-D", str(self.home / "postgres"), "-m", "fast"]
        self.run("postgres", stop, check=False)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """All services of the file but for Docker; nothing of them is left afterwards."""
    with ExitStack() as stack:
        _, (machine,) = stack.enter_context(network(1))
        # not below pytest's folder, which is root's alone: PostgreSQL refuses to run as root
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servers-")))
        home.chmod(0o755)
        names = Path("/etc/netns") / machine.namespace
        names.mkdir(parents=True)
        stack.callback(shutil.rmtree, names)
        (names / "hosts").write_text(f"127.0.0.1 localhost {' '.join(services())}\n")
        made = {name: secrets.token_hex(12) for name in example() if name.endswith("_PASSWORD")}
        values = example() | made | {"PENSTOCK_ADDRESS": machine.address, "PENSTOCK_RUNS": str(home / "runs")}
        for folder in ("redis", "artifacts", "runs"):
            (home / folder).mkdir()
        servers = Servers(machine, home, values, [])
        stack.callback(_end, servers.started)
        stack.callback(servers.stop_postgres)
        servers.start_postgres()
        for name in ("redis", "prefect", "prefect-services", "mlflow"):
            servers.start(name)
        yield servers
        # Still there after everything: none has ended by itself.
        assert [one.poll() for one in servers.started] == [None] * len(servers.started)


@pytest.mark.exhaustive
def test_a_training_runs_through_the_servers(servers: Servers) -> None:
    """From a deployment, on the file's worker; Prefect, MLflow and both databases know of it."""
    servers.start("worker")
    deployed = servers.run("worker", [sys.executable, "-m", "penstock.cli.main", "deploy"], check=False)
    assert deployed.returncode == 0, deployed.stderr
    asked = servers.service("worker").environment
    login = tuple(asked["PREFECT_API_AUTH_STRING"].split(":"))
    with httpx.Client(base_url=asked["PREFECT_API_URL"], auth=(login[0], login[1]), timeout=30) as api:
        found = api.get("/deployments/name/train/quickstart").raise_for_status().json()
        config = {**TINY, "folder": servers.values["PENSTOCK_RUNS"], "name": "through-servers"}
        parameters = {**as_asked(config), "run_folder": f"{servers.values['PENSTOCK_RUNS']}/one"}
        begun = api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})
        run = begun.raise_for_status().json()["id"]

        def state() -> dict[str, Any]:
            return dict(api.get(f"/flow_runs/{run}").raise_for_status().json()["state"])

        until(lambda: state()["type"] in ENDS, 400, "the training ends", every_s=1.0)
        assert state()["name"] == "Completed", (state(), servers.said("worker"))
    summary = json.loads((Path(servers.values["PENSTOCK_RUNS"]) / "one" / "summary.json").read_text())
    assert summary["status"] == "completed"
    figures = json.loads(servers.run("worker", [sys.executable, "-c", FIGURES]).stdout)
    assert [item["status"] for item in figures] == ["FINISHED"]
    assert figures[0]["metrics"] > 10 and figures[0]["artifacts"]
    # Events reach the database through Redis and the services alone: the web server has none in its process.
    until(lambda: servers.count("prefect", "events") > 0, 60, "events are in the database")
    assert servers.count("prefect", "flow_run") > 1 and servers.count("mlflow", "metrics") > 10
    assert any((servers.home / "artifacts").rglob("*.*"))


FIGURES = """
import json, mlflow
client = mlflow.MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("penstock").experiment_id])
print(json.dumps([
    {
        "status": run.info.status,
        "metrics": len(run.data.metrics),
        "artifacts": [item.path for item in client.list_artifacts(run.info.run_id)],
    }
    for run in runs
]))
"""


def test_who_has_no_password_is_refused(servers: Servers) -> None:
    """By Prefect and both databases, on every address. Control: the health of the server, which all may ask for."""
    address = f"http://{servers.machine.address}:4200/api"
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.post(f"{address}/flow_runs/filter", json={}).status_code == 401
    assert "NOAUTH" in servers.run("worker", ["redis-cli", "-h", "redis", "ping"], check=False).stdout
    login = [f"{POSTGRES}/psql", "-h", "postgres", "-U", "penstock", "-w", "-c", "SELECT 1", "prefect"]
    assert servers.run("worker", login, check=False).returncode != 0
