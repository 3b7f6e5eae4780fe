"""Trainings over two machines of a pool, started from a deployment: the same weights as on one, and no end leaves
anything running, whatever is cut off, cancelled or killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.state.events import read_events
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.hosts.conftest import FLOWS, POOL, TINY, Cluster, flow_of
from tests.processes import words_of
from tests.waiting import came_true, until

NO_RESTART = {"engine": {"restarts": 0}}
EARNING = {"reward": {"function": "tests.flows.reward_functions:low_digit"}}  # which chance earns at times
AWAY_S = 30.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def weights(run: Path) -> bytes:
    """Return the trained model's weights."""
    return (run / "models" / "final" / "model.safetensors").read_bytes()


def trains(cluster: Cluster, run: str, folder: str) -> None:
    """Wait until a training is at its iterations."""
    metrics = cluster.home / "runs" / folder / "metrics.jsonl"
    cluster.until(lambda: cluster.state(run) == "Running", 120)
    cluster.until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 1, 240)


@dataclass(frozen=True)
class Ended:
    """A training over both machines that ended well, and what was seen of it while it ran.

    Attributes:
        run: its flow run.
        folder: of the run.
        environments: of its rank on each machine.
        starts: what its hosts were told in secret.
        told: command lines and environments, in which others may read.
    """

    run: str
    folder: Path
    environments: list[dict[str, str]]
    starts: list[dict[str, Any]]
    told: list[str]


@pytest.fixture(scope="module")
def ended(cluster: Cluster) -> Ended:
    """A training that nothing befell."""
    run = cluster.start(cluster.config("two-machines", **EARNING, iterations=4), "two")
    cluster.until(lambda: len(cluster.ranks()) == 2, 120)
    ranks = [machine.processes("penstock.engines.groups.rank") for machine in cluster.machines]
    environments = [rank.environ() for (rank,) in ranks]
    blocks = cluster.api.post("/block_documents/filter", json={"include_secrets": True}).raise_for_status().json()
    starts = [block["data"]["value"] for block in blocks if block["name"].startswith("penstock-host-")]
    everyone = [process for machine in cluster.machines for process in machine.processes()]
    told = [" ".join(words_of(process)) for process in everyone]
    told += [
        json.dumps(process.environ())
        for process in everyone
        if "penstock.engines.groups" in " ".join(words_of(process))
    ]
    assert cluster.ends(run) == "Completed", cluster.last_words()
    assert came_true(lambda: not cluster.ranks(), 10)
    return Ended(run, cluster.home / "runs" / "two", environments, starts, told)


def test_a_pool_gives_a_training_its_hosts(cluster: Cluster, ended: Ended) -> None:
    """The weights are those of as many ranks on one machine, bit for bit; the graph shows which machine did what.

    Ranks talk over the interface that the recipe names, and a host gives up after the silence_s that it says.
    """
    config = cluster.config("two-machines")
    assert (config["hosts"]["interface"], config["hosts"]["silence_s"]) == ("eth0", 5)
    for machine, told in zip(cluster.machines, ended.environments, strict=True):
        assert (told["GLOO_SOCKET_IFNAME"], told["PENSTOCK_ADDRESS"]) == ("eth0", machine.address)
        assert told["MASTER_ADDR"] in [machine.address for machine in cluster.machines]
    hosts = cluster.hosts_of(ended.run)
    assert [host["state"]["name"] for host in hosts] == ["Completed"] * 2
    places = sorted(f"{machine.name} ({machine.address}): CPU" for machine in cluster.machines)
    assert sorted(host["name"].partition(" on ")[2] for host in hosts) == places
    assert [host["name"].partition(" on ")[0] for host in hosts] == [f"{POOL}/0", f"{POOL}/1"]

    group = {"main": {"ranks": 2, "roles": ["actor", "rollout"]}}
    alone = {**TINY, **EARNING, "iterations": 4, "groups": group, "name": "one-machine"}
    recipe = cluster.home / "one.yaml"
    recipe.write_text(yaml.safe_dump(alone | {"base": str(Path("configs/quickstart.yaml").resolve())}))
    done = cluster.penstock("train", str(recipe), "--run", str(cluster.home / "runs" / "one"))
    assert done.returncode == 0, done.stderr
    one, two = cluster.home / "runs" / "one", ended.folder
    assert weights(one) == weights(two)
    assert any(record["metrics"]["reward/mean"] > 0 for record in read_metrics(RunFolder(two))[1:]), (
        "it earned something"
    )
    assert weights(two) != (two / "models" / "initial" / "model.safetensors").read_bytes(), "it learnt something"


def test_no_key_is_where_others_read(cluster: Cluster, ended: Ended) -> None:
    """Not in a run's parameters, name or logs, an argument, the run folder or MLflow; the blocks are gone.

    Control: what is no secret is found by the same search.
    """
    starts = ended.starts
    assert len(starts) == 2
    keys = {start["address"][name] for start in starts for name in ("client_secret", "client_public", "server_public")}
    told = [*ended.told, json.dumps(cluster.run(ended.run)), json.dumps(cluster.hosts_of(ended.run))]
    told += [json.dumps(cluster.api.post("/logs/filter", json={}).raise_for_status().json())]
    files = [path for path in ended.folder.rglob("*") if path.is_file()]
    files += [*cluster.home.glob("*.log"), cluster.home / "runs" / "mlflow.db"]
    everything = "\n".join([*told, *(path.read_bytes().decode(errors="replace") for path in files)])
    assert "penstock.engines.groups.rank" in everything and starts[0]["address"]["endpoint"] not in keys
    assert not [key for key in keys if key in everything]
    left = cluster.api.post("/block_documents/filter", json={}).raise_for_status().json()
    assert not [block for block in left if block["name"].startswith("penstock-host-")]


def test_a_training_goes_on_with_the_machine_that_its_pool_gives_it_again(cluster: Cluster) -> None:
    """One is cut off for as long as it takes to be given up: its pool is asked again, and it comes back as new."""
    folder = RunFolder(cluster.home / "runs" / "again")
    run = cluster.start(cluster.config("again", iterations=30), "again")
    trains(cluster, run, "again")
    first, lonely = len(cluster.hosts_of(run)), cluster.machines[1]
    lonely.cut_off()
    try:
        cluster.until(lambda: len(read_events(folder)) == 1, 60)
    finally:
        lonely.connect()
    assert cluster.ends(run, 240) == "Completed", cluster.last_words()
    lost, recovered = read_events(folder)
    assert (lost["event"], recovered["event"]) == ("HostLost", "recovered")
    assert len(cluster.hosts_of(run)) == first + 1
    assert [record["iteration"] for record in read_metrics(folder)] == list(range(31))
    cluster.hosts_end(run)
    assert came_true(lambda: not cluster.ranks(), 10)


@pytest.mark.exhaustive
def test_a_machine_that_is_cut_off_is_named(cluster: Cluster) -> None:
    """The training fails with what was seen; both machines end their ranks, the lonely one since it hears nothing."""
    run = cluster.start(cluster.config("cut", iterations=500, **NO_RESTART), "cut")
    trains(cluster, run, "cut")
    lonely = cluster.machines[1]
    lonely.cut_off()
    try:
        assert cluster.ends(run, 90) == "Failed", cluster.last_words()
        message = cluster.run(run)["state"]["message"]
        assert "is lost: node-" in message and "is silent" in message
        assert came_true(lambda: not cluster.ranks(), 30)
    finally:
        lonely.connect()
    cluster.hosts_end(run)
    assert read_manifest(RunFolder(cluster.home / "runs" / "cut")).progress.iteration >= 0


def test_cancelling_leaves_nothing_on_any_machine(cluster: Cluster) -> None:
    """Within ten seconds of the button. Control: there was something."""
    run = cluster.start(cluster.config("cancelled", iterations=500), "cancelled")
    trains(cluster, run, "cancelled")
    assert len(cluster.ranks()) == 2
    cluster.set_state(run, "CANCELLING")
    until(lambda: cluster.state(run) == "Cancelled" or not cluster.ranks(), 60, "the worker hears of it")
    assert came_true(lambda: not cluster.ranks(), 10)
    cluster.until(lambda: cluster.state(run) == "Cancelled", 60)
    cluster.hosts_end(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_the_end_of_a_worker_leaves_no_rank(cluster: Cluster, number: signal.Signals) -> None:
    """Prefect's worker goes, and what it started goes on (SIGKILL) or ends (SIGTERM): the training with it, or not."""
    machine = cluster.machines[0]
    folder = f"worker-{number.name}"
    config = cluster.config(folder, iterations=500 if number == signal.SIGTERM else 6, **NO_RESTART)
    run = cluster.start(config, folder)
    trains(cluster, run, folder)
    worker = cluster.workers[machine.name]
    (prefect,) = [one for one in machine.processes("worker") if "start" in words_of(one)][:1]
    os.kill(prefect.pid, number)
    try:
        if number == signal.SIGKILL:
            assert cluster.ends(run) == "Completed", cluster.last_words()
        else:
            assert cluster.ends(run, 90) == "Failed", cluster.last_words()
            assert "is lost" in cluster.run(run)["state"]["message"]
        assert came_true(lambda: not cluster.ranks(), 20)
    finally:
        worker.wait(30)
        last = cluster.heartbeat(machine)
        cluster.start_worker(machine)
        until(lambda: cluster.heartbeat(machine) != last, 60, "the worker is back, and answers signals")


@pytest.mark.exhaustive
def test_a_training_outlives_its_prefect_server(cluster: Cluster, ended: Ended) -> None:
    """Killed under a training and back half a minute later, it finds the training at work, which ends as if left alone.

    The ranks go on meanwhile; the flow waits where it has something to tell. At the end its GPU slots are free again.
    """
    run = cluster.start(cluster.config("server-killed", **EARNING, iterations=4), "server-killed")
    trains(cluster, run, "server-killed")
    cluster.server.kill()
    try:
        assert not cluster.server.answers()
        time.sleep(AWAY_S)
        assert len(cluster.ranks()) == 2
    finally:
        cluster.server.start()
    assert cluster.ends(run) == "Completed", cluster.last_words()
    cluster.hosts_end(run)
    assert weights(cluster.home / "runs" / "server-killed") == weights(ended.folder)
    until(lambda: cluster.slots_taken() == 0, 30, "the slots are free")


@pytest.mark.exhaustive
def test_two_trainings_that_want_the_same_machines_queue(cluster: Cluster) -> None:
    """Neither holds a machine that the other waits for: one after the other, both end."""
    runs = [cluster.start(cluster.config(f"queued-{n}"), f"queued-{n}") for n in range(2)]
    until(lambda: cluster.slots_taken() == 2, 120, "one is admitted")
    assert [cluster.ends(run, 400) for run in runs] == ["Completed"] * 2, cluster.last_words()
    assert cluster.slots_taken() == 0


@pytest.mark.parametrize(
    ("pool", "said"),
    [("nowhere", "Prefect has no work pool 'nowhere'"), (FLOWS, f"has no deployment 'engine-host/{FLOWS}'")],
)
def test_a_pool_that_gives_no_hosts_is_named_at_once(cluster: Cluster, pool: str, said: str) -> None:
    """In the state of the run, with the remedy, before anything starts."""
    config = cluster.config("nowhere")
    config["groups"]["main"]["pool"] = pool
    run = cluster.start(config, f"nowhere-{pool}")
    assert cluster.ends(run, 120) == "Failed"
    message = cluster.run(run)["state"]["message"]
    assert said in message and "penstock deploy --pool" in message


def test_a_pool_without_a_worker_is_named(cluster: Cluster) -> None:
    """As from a terminal: exit code 2 and no traceback, in seconds."""
    done = cluster.penstock("deploy", "--pool", "empty", "--hosts", "1")
    assert done.returncode == 0, done.stderr
    recipe = cluster.home / "empty.yaml"
    config = cluster.config("empty", base=str(Path("configs/quickstart.yaml").resolve()))
    config["groups"]["main"] |= {"pool": "empty", "hosts": 1}
    recipe.write_text(yaml.safe_dump(config))
    done = cluster.penstock("train", str(recipe), "--run", str(cluster.home / "runs" / "empty"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "work pool 'empty' has no worker that is online" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_a_host_that_does_not_reach_the_flow_is_named(cluster: Cluster) -> None:
    """The flow listens on its loopback interface, which is another one on every machine."""
    config = cluster.config("unreachable")
    config["hosts"] = {"join_timeout_s": 20, "silence_s": 5}
    run = cluster.start(config, "unreachable")
    assert cluster.ends(run, 120) == "Failed"
    message = cluster.run(run)["state"]["message"]
    assert f"{POOL}/0: its run" in message and "has not reached this machine" in message
    assert "they dial tcp://127.0.0.1:" in message
    cluster.hosts_end(run)


@pytest.mark.exhaustive
def test_an_interface_that_a_machine_does_not_have_is_named(cluster: Cluster) -> None:
    """With those that it has, from the state of its host's run; the other host is let go."""
    config = cluster.config("no-interface")
    config["hosts"]["interface"] = "ib7"
    run = cluster.start(config, "no-interface")
    assert cluster.ends(run, 120) == "Failed"
    message = cluster.run(run)["state"]["message"]
    assert "node-" in message and "has no network interface 'ib7'" in message
    cluster.hosts_end(run)


def test_hosts_of_a_killed_flow_end_their_ranks(cluster: Cluster) -> None:
    """Nobody tells them: they hear nothing any more, or see that the training's run has ended.

    The last test of this file: the killed training's slots come back when its lease ends, after minutes.
    """
    run = cluster.start(cluster.config("killed", iterations=500), "killed")
    trains(cluster, run, "killed")
    (flow,) = flow_of(run)
    assert len(cluster.ranks()) == 2
    flow.kill()
    assert came_true(lambda: not cluster.ranks(), 30)
    cluster.until(lambda: cluster.state(run) == "Crashed", 60)
    cluster.hosts_end(run)
