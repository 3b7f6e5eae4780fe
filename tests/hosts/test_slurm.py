"""Trainings as Slurm jobs: deploy/slurm/train.sbatch under a Slurm that the test starts, with two machines as nodes.

Its processes are tracked by process group alone, which ranks leave: nothing here depends on Slurm ending them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from penstock.engines.groups.channel import FLOW_KEYS, HOST_KEYS
from penstock.engines.groups.interface import free_port
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder
from tests.hosts.conftest import TINY
from tests.hosts.machines import ROOT, Machine, ip, network
from tests.waiting import came_true, until

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
SLURM_MISSING = [program for program in NEEDED if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(SLURM_MISSING),
        reason=f"no {', '.join(SLURM_MISSING)}: apt-get install slurmctld slurmd slurm-client munge",
    ),
]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Slurm:
    """A controller on this machine, and two nodes."""

    home: Path
    environment: dict[str, str]
    machines: list[Machine]
    daemons: set[int]  # of Slurm on the machines

    def tell(self, *words: str, within_s: float = 60, **variables: str) -> str:
        """Run a command on this machine; return what it prints."""
        own = self.environment | variables
        done = subprocess.run(words, env=own, cwd=ROOT, capture_output=True, text=True, check=False, timeout=within_s)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def recipe(self, name: str, **changes: Any) -> Path:
        """Write a recipe with one CPU rank on each machine, and return its file."""
        group = {"ranks": 1, "roles": ["actor", "rollout"]}
        tree = {**TINY, "base": str(ROOT / TINY["base"]), "name": name, "folder": str(self.home / "runs")}
        path = self.home / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**tree, "groups": {"main": group}, "hosts": {"silence_s": 5}, **changes}))
        return path

    def sbatch(self, name: str, *arguments: str, **variables: str) -> str:
        """Submit a training into the run folder of a name; return the job's number."""
        words = ("sbatch", "--parsable", f"--output={self.log(name)}", str(SCRIPT))
        return self.tell(*words, *arguments, **variables).strip()

    def log(self, name: str) -> Path:
        """Return where the job of a name writes."""
        return self.home / f"job-{name}.log"

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        words = self.tell("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def until(self, condition: Callable[[], Any], within_s: float) -> None:
        """Wait for a condition; where it does not come true, tell what everybody said."""
        assert came_true(condition, within_s), self.words()

    def ends(self, number: str, within_s: float) -> tuple[str, str]:
        """Wait for the end of a job; return its state and its exit code, as code:signal."""
        self.until(lambda: self.job(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), within_s)
        told = self.job(number)
        return told["JobState"], told["ExitCode"]

    def processes(self, word: str | None = None) -> list[psutil.Process]:
        """Return the processes of jobs on both machines, or those whose command line has a word."""
        there = [process for machine in self.machines for process in machine.processes(word)]
        return [process for process in there if process.pid not in self.daemons]

    def words(self) -> str:
        """Return the end of what everybody said."""
        logs = sorted(self.home.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two idle nodes; nothing of it is left afterwards."""
    home = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        address, machines = stack.enter_context(network(2))
        settings = CONFIGURATION.format(
            controller=socket.gethostname(), address=address, port=free_port(address), home=home
        )
        nodes = [f"NodeName={one.name} NodeAddr={one.address} CPUs={os.cpu_count()}" for one in machines]
        (home / "slurm.conf").write_text("\n".join([*nodes, settings]))
        (home / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # no job is in a cgroup; by itself it looks for one
        for name in ("bin", "state", *(f"spool-{one.name}" for one in machines)):
            (home / name).mkdir()
        penstock = home / "bin" / "penstock"
        penstock.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock.cli.main "$@"\n')
        penstock.chmod(0o755)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        environment = inherited | {
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(home / "slurm.conf"),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        stack.enter_context(_munge(home))
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        with (home / "slurmctld.log").open("wb") as log:
            started.append(subprocess.Popen(["slurmctld", "-D"], env=environment, stdout=log, stderr=log))
        for one in machines:
            started.append(one.start(["slurmd", "-D", "-N", one.name], environment, home / f"{one.name}.log"))
        found = Slurm(home, environment, machines, {daemon.pid for daemon in started})
        idle = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        answers = ["scontrol", "ping"]
        found.until(lambda: subprocess.run(answers, env=environment, capture_output=True).returncode == 0, 30)
        found.until(lambda: len(found.tell(*idle).split()) == 2, 60)
        yield found


@contextmanager
def _munge(home: Path) -> Iterator[None]:
    """Have a munge daemon for these machines alone, with a key of its own."""
    folder = home / "munge"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    daemon = subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
    try:
        until((folder / "socket").exists, 20, "munge listens")
        yield
    finally:
        daemon.terminate()
        daemon.wait(20)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait(20)


def _contents(folder: Path) -> str:
    texts = []
    for path in filter(Path.is_file, folder.rglob("*")):
        with suppress(FileNotFoundError):
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(texts)


def weights(run: Path) -> bytes:
    """Return the trained model's weights."""
    return (run / "models" / "final" / "model.safetensors").read_bytes()


def test_a_job_trains_over_all_its_nodes(slurm: Slurm) -> None:
    """With the weights of as many ranks on one machine, bit for bit. Its keys are nowhere where others read.

    Controls: what is no key is found by the same search; the training has changed its weights.
    """
    recipe = slurm.recipe("two")
    number = slurm.sbatch("two", str(recipe), "--run", str(slurm.home / "runs" / "two"))
    slurm.until(lambda: len(slurm.processes("penstock.engines.groups.rank")) == 2, 180)
    environments = [process.environ() for process in slurm.processes("penstock.cli.main")]
    (flow,) = [json.loads(own[FLOW_KEYS]) for own in environments if FLOW_KEYS in own and HOST_KEYS not in own]
    hosts = [json.loads(own[HOST_KEYS]) for own in environments if HOST_KEYS in own and FLOW_KEYS not in own]
    assert len(hosts) >= 2 and all("server_secret" not in keys for keys in hosts)
    told = [" ".join(process.cmdline()) for machine in slurm.machines for process in machine.processes()]
    told += [json.dumps(process.environ()) for process in slurm.processes("penstock.engines.groups.rank")]
    told.append(_contents(slurm.home))  # what Slurm keeps of a job that runs
    assert slurm.ends(number, 240) == ("COMPLETED", "0:0"), slurm.words()
    everything = "\n".join([*told, _contents(slurm.home)])
    assert "penstock.engines.groups.rank" in everything
    assert not [name for name, key in flow.items() if key in everything]
    assert came_true(lambda: not slurm.processes(), 10)

    alone = slurm.recipe("one", groups={"main": {"ranks": 2, "roles": ["actor", "rollout"]}}, hosts=None)
    words = (sys.executable, "-m", "penstock.cli.main", "train", str(alone), "--run", str(slurm.home / "runs" / "one"))
    slurm.tell(*words, within_s=240)
    one, two = (slurm.home / "runs" / name for name in ("one", "two"))
    assert weights(one) == weights(two)
    assert weights(two) != (two / "models" / "initial" / "model.safetensors").read_bytes(), "it learnt something"


@pytest.mark.exhaustive
def test_scancel_leaves_nothing_on_any_node(slurm: Slurm) -> None:
    """In mid-training: no process of the job is left, and another job goes on with the run. Control: there were some.

    The training keeps to the interface that is named.
    """
    run = slurm.home / "runs" / "cancelled"
    recipe = slurm.recipe("cancelled", iterations=500)
    number = slurm.sbatch("cancelled", str(recipe), "--run", str(run), PENSTOCK_INTERFACE="eth0")
    slurm.until(lambda: len(_metrics(run)) > 1, 240)
    ranks = slurm.processes("penstock.engines.groups.rank")
    assert [rank.environ()["GLOO_SOCKET_IFNAME"] for rank in ranks] == ["eth0"] * 2
    slurm.tell("scancel", number)
    assert slurm.ends(number, 90)[0] == "CANCELLED"
    assert came_true(lambda: not slurm.processes(), 10), [process.cmdline() for process in slurm.processes()]
    done = read_manifest(RunFolder(run)).progress.iteration
    number = slurm.sbatch("resumed", "--resume", str(run), f"iterations={done + 1}")
    assert slurm.ends(number, 240) == ("COMPLETED", "0:0"), slurm.words()
    assert read_manifest(RunFolder(run)).progress.iteration == done + 1


def _metrics(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.is_file() else []


def test_a_mistake_in_a_recipe_is_the_job_s(slurm: Slurm) -> None:
    """Exit code 2 and the words of the command; the hosts, which never met a training, are let go."""
    number = slurm.sbatch("mistake", str(slurm.recipe("mistake")), "rollout.no_such=1")
    assert slurm.ends(number, 120) == ("FAILED", "2:0"), slurm.words()
    assert "rollout.no_such" in slurm.log("mistake").read_text()
    assert came_true(lambda: not slurm.processes(), 10)


@pytest.mark.exhaustive
def test_a_node_that_cannot_be_a_host_ends_the_job(slurm: Slurm) -> None:
    """With what is wrong there, long before the deadline for hosts to join: here only one node has ib0."""
    first = slurm.machines[0].namespace
    ip("-n", first, "link", "add", "ib0", "type", "bridge")
    ip("-n", first, "addr", "add", "192.0.2.1/24", "dev", "ib0")
    ip("-n", first, "link", "set", "ib0", "up")
    number = slurm.sbatch("lonely", str(slurm.recipe("lonely")), PENSTOCK_INTERFACE="ib0")
    assert slurm.ends(number, 120)[0] == "FAILED", slurm.words()
    assert "node-1 has no network interface 'ib0'" in slurm.log("lonely").read_text()
    assert came_true(lambda: not slurm.processes(), 10)
