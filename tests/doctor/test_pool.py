"""What `penstock doctor --pool` says of machines made up for it: what is wrong is named, where all is well nothing."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.doctor.pool import diagnose_pool, machine_table
from penstock.engines.commands.hosts import GpuFacts, HostFacts
from penstock.session.examination import FolderFound, LinksFound, Machine, PoolFound
from penstock.session.machines.pools import Pool

GIB = 1 << 30
VERSIONS = {"python": "3.12.4", "torch": "2.11.0", "vllm": "0.26.1", "msgpack": "1.1.0"}


def gpu(uuid: str, name: str = "NVIDIA H200") -> GpuFacts:
    return GpuFacts(name, uuid, 140 * GIB, True)


def machine(number: int, **changes: Any) -> Machine:
    """One of two machines, or what it is with other facts."""
    facts = HostFacts(
        machine=f"node-{number}",
        interface="eth0",
        address=f"10.0.0.{number + 2}",
        cores=64,
        free_bytes=500 * GIB,
        shm_bytes=64 * GIB,
        gpus=[gpu(f"GPU-{number}-{index}") for index in range(2)],
        versions=VERSIONS,
        clock_s=0.0,
    )
    return Machine(replace(facts, **changes), skew_s=0.002, round_trip_s=0.001)


FOLDERS = {"h200/0": FolderFound(1e9, 2e9), "h200/1": FolderFound(9e8, 2e9)}
LINKS = LinksFound("nccl", 2, {"all_gather": 40e9, "broadcast": 30e9, "all_reduce": 42e9})
WELL = PoolFound(
    pool=Pool("h200", 2, 2, "prefect.lan"),
    missing={},
    machines={"h200/0": machine(0), "h200/1": machine(1)},
    folder="/shared/runs",
    folders=FOLDERS,
    links=LINKS,
    address="10.0.0.1",
)


def with_second(second: Machine) -> PoolFound:
    """The pool with another second machine."""
    return replace(WELL, machines={"h200/0": machine(0), "h200/1": second})


def test_a_pool_that_is_well_has_no_warning() -> None:
    """Every subject is spoken of."""
    lines = diagnose_pool(WELL, VERSIONS)
    assert {line.level for line in lines} == {"ok"}
    assert [line.subject for line in lines] == ["machines", "GPUs", "versions", "clocks", "run folder", "links"]
    assert "2 machines: each writes 900 MB/s or more, read here at 2000 MB/s" in lines[4].text
    assert lines[5].text.startswith("nccl, one rank on each of 2 machines: all_gather 40.00 GB/s")


MISTAKE = UserError("the run folder is another folder on host h200/1, or none", "share it")
OTHER_KIND = machine(1, gpus=[gpu("GPU-7", "NVIDIA L4"), gpu("GPU-8", "NVIDIA L4")])
WRONG = {
    "gone": (replace(WELL, missing={"h200/2": "no worker is free"}), "machines", "problem", "h200/2 has not come"),
    "fewer GPUs": (with_second(machine(1, gpus=[gpu("GPU-9")])), "GPUs", "problem", "(node-1) has 1, and the pool was"),
    "more GPUs": (
        with_second(machine(1, gpus=[gpu(f"GPU-1-{n}") for n in range(3)])),
        "GPUs",
        "warning",
        "(node-1) has 3, and the pool",
    ),
    "other GPUs": (with_second(OTHER_KIND), "GPUs", "warning", "of different kinds: NVIDIA H200, NVIDIA L4"),
    "one machine": (with_second(machine(0)), "versions", "problem", "are on one machine, node-0"),
    "shm": (with_second(machine(1, shm_bytes=64 << 20)), "shared memory", "problem", "(node-1) has 0.06 GiB"),
    "torch": (
        with_second(machine(1, versions=VERSIONS | {"torch": "2.12.0"})),
        "versions",
        "problem",
        "hosts have different versions of torch",
    ),
    "msgpack": (
        with_second(machine(1, versions=VERSIONS | {"msgpack": "1.0.0"})),
        "versions",
        "warning",
        "msgpack: 1.1.0 on this machine, 1.1.0 on h200/0, 1.0.0 on h200/1",
    ),
    "clock": (with_second(replace(machine(1), skew_s=-3.0)), "clocks", "warning", "by -3.0 s"),
    "folder": (
        replace(WELL, folders=FOLDERS | {"h200/1": FolderFound(mistake=MISTAKE)}),
        "run folder",
        "problem",
        "another folder on host h200/1",
    ),
    "slow disk": (
        replace(WELL, folders=FOLDERS | {"h200/1": FolderFound(2e7, 2e9)}),
        "run folder",
        "warning",
        "each writes 20 MB/s",
    ),
    "no links": (
        replace(WELL, links=LinksFound("nccl", 2, failure="rank 1: exited")),
        "links",
        "problem",
        "rank 1: ex",
    ),
    "slow links": (
        replace(WELL, links=LinksFound("nccl", 2, {"all_gather": 1e8})),
        "links",
        "warning",
        "all_gather 0.10 GB/s",
    ),
    "no second": (replace(WELL, links=None), "links", "warning", "fewer than two machines"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_a_remedy(name: str) -> None:
    """At its level; the subject is not said to be well beside it, other than of a folder that others share."""
    found, subject, level, said = WRONG[name]
    lines = [line for line in diagnose_pool(found, VERSIONS) if line.subject == subject]
    worse = [line for line in lines if line.level != "ok"]
    assert [line.level for line in worse] == [level]
    assert said in worse[0].text and worse[0].remedy
    assert len(lines) == len(worse) or name == "folder"


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    """What a round trip takes may be all of the difference. Control: a quick one."""
    for round_trip_s, level in ((6.0, "ok"), (0.1, "warning")):
        slow = with_second(replace(machine(1), skew_s=3.0, round_trip_s=round_trip_s))
        assert [line.level for line in diagnose_pool(slow, VERSIONS) if line.subject == "clocks"] == [level]


def test_this_machine_has_a_say_in_versions() -> None:
    """It starts trainings, and computes nothing of them: a warning."""
    lines = [line for line in diagnose_pool(WELL, VERSIONS | {"torch": "2.10.0"}) if line.subject == "versions"]
    assert [line.level for line in lines] == ["warning"]
    assert "torch: 2.10.0 on this machine" in lines[0].text


def test_a_machine_without_gpus_is_one_of_a_pool_without() -> None:
    """Ranks are CPU ranks there."""
    bare = {name: machine(n, gpus=[]) for n, name in enumerate(FOLDERS)}
    lines = diagnose_pool(replace(WELL, machines=bare, pool=replace(WELL.pool, gpus=0)), VERSIONS)
    assert [(line.level, line.text) for line in lines if line.subject == "GPUs"] == [("ok", "none, as deployed")]


def test_the_table_has_a_row_for_each_machine() -> None:
    shown = io.StringIO()
    Console(width=240, file=shown).print(machine_table(WELL.machines))
    for part in ("h200/1", "node-1", "10.0.0.3 (eth0)", "2 x NVIDIA H200, 140 GiB free", "500.0 GiB", "+0.002 s"):
        assert part in shown.getvalue()
