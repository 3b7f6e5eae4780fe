"""`penstock doctor --pool` on two machines: what is well is said to be, and what would stop a training is named."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.hosts.conftest import FLOWS, POOL, Cluster
from tests.hosts.machines import ip
from tests.processes import words_of
from tests.waiting import came_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LEVELS = ("ok", "warning", "problem")
QUICKSTART = str(Path("configs/quickstart.yaml").resolve())


def examined(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Examine the pool, and see that nothing of it is left: no host, no rank, no file, no slot."""
    (cluster.home / "runs").mkdir(exist_ok=True)
    done = cluster.penstock("doctor", "--pool", POOL, *arguments)
    assert "Traceback" not in done.stdout + done.stderr
    assert came_true(
        lambda: not any(machine.processes("penstock.engines.groups.host") for machine in cluster.machines), 20
    )
    assert not cluster.ranks()
    assert not list((cluster.home / "runs").glob(".penstock-doctor*"))
    limit = cluster.api.get(f"/v2/concurrency_limits/gpus-{POOL}").raise_for_status().json()
    assert limit["active_slots"] == 0
    return done


def judgements(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str]]:
    """Return level, subject and text of each line of the table, which folds long ones."""
    found: list[tuple[str, str, str]] = []
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 4 and cells[0] in LEVELS:
            found.append((cells[0], cells[1], cells[2]))
        elif len(cells) == 4 and found and not cells[0]:
            found[-1] = (*found[-1][:2], f"{found[-1][2]} {cells[2]}")
    return found


def levels(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the level of each subject, the worst where it has several lines."""
    found: dict[str, str] = {}
    for level, subject, _ in judgements(done):
        found[subject] = max(level, found.get(subject, "ok"), key=LEVELS.index)
    return found


def told(done: subprocess.CompletedProcess[str], subject: str) -> str:
    """Return what is said of a subject."""
    return " ".join(text for _, about, text in judgements(done) if about == subject)


def test_machines_that_are_well_are_said_to_be(cluster: Cluster) -> None:
    """Every subject is looked at, over the machines' own network; a folder is all that has to be named."""
    done = examined(cluster, str(cluster.home / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = levels(done)
    assert set(found) == {"machines", "GPUs", "versions", "clocks", "run folder", "links"}
    assert {found[subject] for subject in ("machines", "GPUs", "versions", "clocks")} == {"ok"}
    for machine in cluster.machines:
        assert machine.name in done.stdout and f"{machine.address}" in done.stdout
    assert "gloo, one rank on each of 2 machines" in told(done, "links")


@contextmanager
def an_interface_of_its_own(cluster: Cluster) -> Iterator[str]:
    """Give one of the machines a network that the other one does not have."""
    inside = ("-n", cluster.machines[0].namespace)
    ip(*inside, "link", "add", "fast0", "type", "bridge")
    try:
        ip(*inside, "addr", "add", "10.199.0.1/24", "dev", "fast0")
        ip(*inside, "link", "set", "fast0", "up")
        yield "fast0"
    finally:
        ip(*inside, "link", "del", "fast0")


@pytest.mark.exhaustive
def test_a_machine_without_the_interface_is_a_problem(cluster: Cluster) -> None:
    """The other machine is examined all the same."""
    with an_interface_of_its_own(cluster) as interface:
        hosts = {"address": cluster.address, "interface": interface, "join_timeout_s": 60}
        recipe = cluster.home / "fast.yaml"
        recipe.write_text(yaml.safe_dump(cluster.config("fast", base=QUICKSTART, hosts=hosts)))
        done = examined(cluster, str(recipe))
    assert done.returncode == 1, done.stdout + done.stderr
    found = levels(done)
    assert (found["machines"], found["versions"], found["links"]) == ("problem", "ok", "warning")
    assert f"{cluster.machines[1].name} has no network interface 'fast0'" in told(done, "machines")


@pytest.mark.exhaustive
def test_a_folder_of_each_machine_alone_is_a_problem(cluster: Cluster) -> None:
    """What one machine hides behind a file system of its own is no run folder."""
    runs, lonely = cluster.home / "runs", cluster.machines[1]
    runs.mkdir(exist_ok=True)
    worker = cluster.workers[lonely.name]
    (prefect,) = [one for one in lonely.processes("worker") if "start" in words_of(one)][:1]
    enter = ["nsenter", "--target", str(prefect.pid), "--mount"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", str(runs)], check=True)
    try:
        done = examined(cluster, str(runs))
    finally:
        subprocess.run([*enter, "umount", "-l", str(runs)], check=True)
    assert worker.poll() is None
    assert done.returncode == 1, done.stdout + done.stderr
    assert levels(done)["run folder"] == "problem"
    assert "is another folder on host" in told(done, "run folder")


@pytest.mark.parametrize(
    ("pool", "said"),
    [("nowhere", "Prefect has no work pool 'nowhere'"), (FLOWS, f"has no deployment 'engine-host/{FLOWS}'")],
)
def test_a_pool_that_is_none_is_a_mistake(cluster: Cluster, pool: str, said: str) -> None:
    """Exit code 2 with the remedy, as for a training."""
    done = cluster.penstock("doctor", "--pool", pool)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and "penstock deploy --pool" in done.stderr
