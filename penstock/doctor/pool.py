"""`penstock doctor --pool`: judges the machines of a work pool together, from what was found on them.

A problem would stop a training on the pool, a warning makes it slow or hard to follow. Judgements are pure functions of
`PoolFound`. Left out: how it was found (penstock/session/examination.py), and each machine by itself: `penstock doctor`
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.base.errors import UserError
from penstock.doctor.diagnosis import Diagnosis, Level
from penstock.session.examination import Machine, PoolFound
from penstock.session.machines.hosts import ALIKE, check_alike

if TYPE_CHECKING:
    from rich.table import Table

GIB, MB, GB = 1 << 30, 1e6, 1e9
SKEW_S = 1.0
FOLDER_MB_PER_S = 100.0  # a checkpoint of 100 GB takes a quarter of an hour then
LINK_GB_PER_S = {"gloo": 0.1, "nccl": 1.0}  # gigabit Ethernet; 10 gigabit
SHARED_MEMORY = GIB
FASTER = "name the faster network of the machines, if they have one: hosts.interface"


def diagnose_pool(found: PoolFound, here: Mapping[str, str]) -> list[Diagnosis]:
    """Judge the machines of a pool; `here` are the versions of this machine, from which trainings are started."""
    return [
        *machines(found),
        *gpus(found),
        *shared_memory(found),
        *versions(found, here),
        *clocks(found),
        *run_folder(found),
        *links(found),
    ]


def machine_table(machines: Mapping[str, Machine]) -> Table:
    """Return a row for each machine that has come."""
    from rich.table import Table

    shown = Table("host", "machine", "address", "GPUs", "cores", "memory free", "/dev/shm free", "clock", "versions")
    for name, machine in machines.items():
        facts = machine.facts
        libraries = ", ".join(f"{library} {version}" for library, version in facts.versions.items())
        shown.add_row(
            name,
            facts.machine,
            f"{facts.address} ({facts.interface})",
            _gpus_of(machine),
            str(facts.cores),
            f"{facts.free_bytes / GIB:.1f} GiB",
            f"{facts.shm_bytes / GIB:.1f} GiB",
            _clock_of(machine),
            libraries,
        )
    return shown


def _gpus_of(machine: Machine) -> str:
    kinds = Counter(gpu.name for gpu in machine.facts.gpus)
    free = [gpu.free_bytes / GIB for gpu in machine.facts.gpus]
    each = f", {min(free):.0f} GiB free" if free else ""
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) + each or "none"


def _clock_of(machine: Machine) -> str:
    return f"{machine.skew_s:+.3f} s (within {machine.round_trip_s / 2:.3f})"


# ---- judgements ----------------------------------------------------------------------------------------------------


def machines(found: PoolFound) -> Iterator[Diagnosis]:
    """Every machine that the pool was said to have gives a host, which reaches this one."""
    subject = "machines"
    for name, why in found.missing.items():
        remedy = (
            f"a worker on each machine: prefect worker start --pool {found.pool.name} --limit 1; hosts dial "
            f"{found.address}, which must be an address of this machine that they reach (hosts.address)"
        )
        yield Diagnosis(subject, "problem", f"{name} has not come: {why}", remedy)
    if not found.missing:
        yield Diagnosis(subject, "ok", f"all {len(found.machines)} have come")


def gpus(found: PoolFound) -> Iterator[Diagnosis]:
    """Each machine has as many GPUs as trainings count on, and all are of one kind."""
    said, subject = found.pool.gpus, "GPUs"
    wrong = [(name, len(machine.facts.gpus)) for name, machine in found.machines.items()]
    wrong = [(name, count) for name, count in wrong if count != said]
    for name, count in wrong:
        again = f"say what they have: penstock deploy --pool {found.pool.name} --hosts {found.pool.hosts} --gpus M"
        text = f"{name} ({found.machines[name].facts.machine}) has {count}, and the pool was deployed with {said} each"
        # a training asks for those that were said, so one machine with more stands idle, and one with fewer refuses
        yield Diagnosis(subject, "problem" if count < said else "warning", text, again)
    kinds = {gpu.name for machine in found.machines.values() for gpu in machine.facts.gpus}
    if len(kinds) > 1:
        text = f"of different kinds: {', '.join(sorted(kinds))}: a group is as fast as its slowest rank"
        yield Diagnosis(subject, "warning", text, "make a pool for each kind")
    elif found.machines and not wrong:
        yield Diagnosis(subject, "ok", f"{said} on each machine" if said else "none, as deployed")


def shared_memory(found: PoolFound) -> Iterator[Diagnosis]:
    """NCCL between GPUs of a machine goes through /dev/shm, of which a container has 64 MiB unless told."""
    for name, machine in found.machines.items():
        if machine.facts.shm_bytes < SHARED_MEMORY:
            level: Level = "problem" if len(machine.facts.gpus) > 1 else "warning"
            text = f"{name} ({machine.facts.machine}) has {machine.facts.shm_bytes / GIB:.2f} GiB of /dev/shm free"
            yield Diagnosis("shared memory", level, text, "docker run --shm-size=8g, or remove what is left in it")


def versions(found: PoolFound, here: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The libraries that numbers come from are the same on all machines, and no GPU is given twice."""
    if not found.machines:
        return
    facts = {name: machine.facts for name, machine in found.machines.items()}
    try:
        check_alike(facts)
    except UserError as mistake:
        yield Diagnosis("versions", "problem", mistake.problem, mistake.remedy)
        return
    everywhere = {"this machine": here} | {name: item.versions for name, item in facts.items()}
    told = {
        library: {name: of.get(library, "none") for name, of in everywhere.items()}
        for library in dict.fromkeys(library for of in everywhere.values() for library in of)
    }
    different = {library: of for library, of in told.items() if len(set(of.values())) > 1}
    for library, of in different.items():
        text = f"{library}: {', '.join(f'{version} on {name}' for name, version in of.items())}"
        yield Diagnosis("versions", "warning", text, "install the same everywhere, also where trainings start")
    if not different:
        same = ", ".join(f"{name} {here[name]}" for name in ALIKE if name in here)
        yield Diagnosis("versions", "ok", f"the same everywhere: {same}")


def clocks(found: PoolFound) -> Iterator[Diagnosis]:
    """Clocks that differ put events and log lines of machines in a wrong order."""
    late = False
    for name, machine in found.machines.items():
        if abs(machine.skew_s) - machine.round_trip_s / 2 > SKEW_S:
            late = True
            text = (
                f"the clock of {name} ({machine.facts.machine}) differs from this machine's by {machine.skew_s:+.1f} s"
            )
            yield Diagnosis("clocks", "warning", text, "keep them by NTP: timedatectl set-ntp true, or chrony")
    if found.machines and not late:
        most = max(abs(machine.skew_s) for machine in found.machines.values())
        yield Diagnosis("clocks", "ok", f"within {max(most, 0.001):.3f} s of this machine's")


def run_folder(found: PoolFound) -> Iterator[Diagnosis]:
    """The run folder is one folder to all, and as quick as checkpoints ask for."""
    subject = "run folder"
    for item in found.folders.values():
        if item.mistake is not None:
            yield Diagnosis(subject, "problem", item.mistake.problem, item.mistake.remedy)
    speeds = {name: item for name, item in found.folders.items() if item.mistake is None}
    if not speeds:
        return
    written = min(item.written for item in speeds.values()) / MB
    read = min(item.read for item in speeds.values()) / MB
    text = f"{found.folder} is one folder on {len(speeds)} machines: each writes {written:.0f} MB/s or more, "
    text += f"read here at {read:.0f} MB/s or more"
    if min(written, read) < FOLDER_MB_PER_S:
        yield Diagnosis(
            subject, "warning", text, "put 'folder' on a faster file system, or save less often (checkpoint.every)"
        )
    else:
        yield Diagnosis(subject, "ok", text)


def links(found: PoolFound) -> Iterator[Diagnosis]:
    """Ranks of different machines reach each other, and how fast."""
    subject, measured = "links", found.links
    if measured is None:
        if found.pool.hosts > 1:
            text = "not measured: fewer than two machines can use the run folder, where ranks write their logs"
            yield Diagnosis(subject, "warning", text, "put the problems above right first")
        return
    if measured.failure:
        text = f"{measured.ranks} ranks, one on each machine, cannot work together over {measured.backend}: "
        remedy = "let the machines reach each other on all ports (firewall), and name the interface: hosts.interface"
        yield Diagnosis(subject, "problem", text + measured.failure, remedy)
        return
    text = f"{measured.backend}, one rank on each of {measured.ranks} machines: " + ", ".join(
        f"{name} {rate / GB:.2f} GB/s" for name, rate in measured.bandwidth.items()
    )
    slow = min(measured.bandwidth.values()) / GB < LINK_GB_PER_S[measured.backend]
    yield Diagnosis(subject, "warning" if slow else "ok", text, FASTER if slow else "")
