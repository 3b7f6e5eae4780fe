"""What is found on the machines of a work pool without a training: facts, clocks, the run folder, the links.

Every machine gets a host, as for a training; one that does not come is a finding, and the others are examined. Nothing
of it is left afterwards.

Left out: what is well and what is not (penstock/doctor/pool.py).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from penstock.base.errors import UserError
from penstock.base.files import nearest_existing
from penstock.configs.sections.run import HostsConfig
from penstock.engines.commands.hosts import HostFacts, TellFacts, WriteFile
from penstock.engines.groups.group import EngineError, EngineGroup, RankLost
from penstock.engines.groups.hosts import REPLY_S, HostFailed, Hosts
from penstock.engines.groups.links import COLLECTIVES, MIB, bus_bandwidth, group_of, seconds_of
from penstock.engines.groups.spec import RankDevice
from penstock.reports.progress import waiting
from penstock.session.machines.hosts import absent_after, folder_mistakes, gathering
from penstock.session.machines.pools import Pool, ask_for_hosts

LOOKS = 4  # at a clock; the quickest tells the most
FILE_BYTES, FILE_S = 64 * MIB, 120.0
LINK_BYTES, ROUNDS, LINKS_START_S = 64 * MIB, 5, 180.0
EXAMINATION = "penstock doctor"  # stands where the names of hosts' runs have a training's


@dataclass(frozen=True)
class Machine:
    """What a host told of its machine, and how far its clock is from this one's, within half a `round_trip_s`."""

    facts: HostFacts
    skew_s: float
    round_trip_s: float


@dataclass(frozen=True)
class FolderFound:
    """A file that a machine wrote to the run folder and this one read: bytes per second. Or why there is none."""

    written: float = 0.0
    read: float = 0.0
    mistake: UserError | None = None


@dataclass(frozen=True)
class LinksFound:
    """Bus bandwidth of collectives with a rank on every machine, bytes per second. Or why there is none."""

    backend: Literal["gloo", "nccl"] = "gloo"
    ranks: int = 0
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class PoolFound:
    """What was found of a pool.

    Attributes:
        missing: hosts that have not come or have gone, and what is known of it.
        machines: by host.
        folder: of the runs; `folders` is how machines reach it, by host.
        links: None where fewer than two machines can be asked.
        address: of this machine, where it listened.
    """

    pool: Pool
    missing: Mapping[str, str]
    machines: Mapping[str, Machine]
    folder: str
    folders: Mapping[str, FolderFound]
    links: LinksFound | None
    address: str


@contextmanager
def machines_of(pool: Pool, network: HostsConfig, logs: Path) -> Iterator[tuple[Hosts, dict[str, str]]]:
    """Have every machine of a pool start a host; yield those that came in time, and why others did not.

    Raises:
        UserError: this machine cannot listen where it is told to.
    """
    names = [f"{pool.name}/{number}" for number in range(pool.hosts)]
    with gathering(logs, network, names) as (hosts, asked):
        asked += ask_for_hosts(pool.name, names, hosts.address, network, EXAMINATION)
        with waiting(Console(), f"waiting for hosts: {', '.join(names)}"):
            absent = absent_after(hosts, network.join_timeout_s, asked, all)
        yield hosts, {name: why.text for name, why in absent.items()}


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make a folder where the runs are, or will be, and remove it afterwards."""
    scratch = nearest_existing(folder.absolute()) / f".penstock-doctor-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def ask_machines(hosts: Hosts, missing: dict[str, str]) -> dict[str, Machine]:
    """Ask every host that has come what its machine has; one that cannot tell joins the `missing`."""
    found = {}
    for name in sorted(hosts.joined()):
        try:
            found[name] = min((_look_at(hosts, name) for _ in range(LOOKS)), key=lambda look: look.round_trip_s)
        except (HostFailed, UserError) as error:
            missing[name] = str(error)
    return found


def _look_at(hosts: Hosts, name: str) -> Machine:
    asked_at, began = time.time(), time.perf_counter()
    facts = hosts.begin(name, TellFacts()).result(REPLY_S)
    round_trip_s = time.perf_counter() - began
    return Machine(facts, facts.clock_s - (asked_at + round_trip_s / 2), round_trip_s)


def measure_folder(hosts: Hosts, names: Sequence[str], folder: Path) -> dict[str, FolderFound]:
    """Let every host write a file, one after the other, and read it here."""
    mistakes = folder_mistakes(hosts, folder, names)
    found = {name: FolderFound(mistake=mistake) for name, mistake in mistakes.items()}
    for name in names:
        if name not in mistakes:
            found[name] = _write_and_read(hosts, name, folder / name.replace("/", "-"))
    return found


def _write_and_read(hosts: Hosts, name: str, path: Path) -> FolderFound:
    try:
        written = hosts.begin(name, WriteFile(str(path), FILE_BYTES)).result(FILE_S)
    except (HostFailed, TimeoutError) as error:
        why = str(error).splitlines()[-1] if str(error) else f"it took more than {FILE_S:g} s"
        return FolderFound(mistake=UserError(f"host {name} cannot write to {path.parent}: {why}", "see to its disk"))
    began = time.perf_counter()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from its disk, not from this machine's memory
        content = file.read()
    seconds = time.perf_counter() - began
    path.unlink()
    if hashlib.sha256(content).hexdigest() != written.sha256:
        remedy = "its file system shows files before they are whole: look at how it is mounted"
        return FolderFound(mistake=UserError(f"{path} is read as something else than host {name} wrote", remedy))
    return FolderFound(FILE_BYTES / written.seconds, FILE_BYTES / seconds)


def measure_links(hosts: Hosts, machines: Mapping[str, Machine], log_dir: Path) -> LinksFound | None:
    """Measure the collectives with a rank on each of these machines, on its first GPU where all have one."""
    if len(machines) < 2:
        return None
    gpu = 0 if all(machine.facts.gpus for machine in machines.values()) else None
    devices = [RankDevice(gpu, name) for name in machines]
    backend: Literal["gloo", "nccl"] = "gloo" if gpu is None else "nccl"
    try:
        with EngineGroup(group_of(devices, log_dir, LINKS_START_S), hosts) as group:
            group.wait_ready()
            bandwidth: dict[str, float] = {}
            for collective in COLLECTIVES:
                size, seconds = seconds_of(group, collective, LINK_BYTES, ROUNDS)
                bandwidth[collective] = bus_bandwidth(collective, size, seconds, len(devices))
    except (EngineError, RankLost, HostFailed, UserError) as error:
        return LinksFound(backend, len(devices), failure=_in_a_line(error))
    return LinksFound(backend, len(devices), bandwidth)


def _in_a_line(error: Exception) -> str:
    """Return what an error of an engine group comes to, without the stacks: its logs are removed with the folder."""
    if isinstance(error, EngineError):
        return f"rank {error.rank}: {error.remote_traceback.strip().splitlines()[-1]}"
    if isinstance(error, RankLost):
        return f"rank {error.rank}: {error.reason}"
    return str(error).splitlines()[0]
