"""The environment of a group's ranks on one host: that of the host itself, with what the engines need on top.

A host that the flow starts has the flow's environment; one on another machine has that of whatever started it there.

Left out: what no other process of the machine may read, which a rank is told through a pipe (processes.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import MeetingPlace, StartRanks
from penstock.engines.groups import interface
from penstock.engines.groups.channel import FLOW_KEYS, HOST_KEYS
from penstock.engines.groups.interface import Interface
from penstock.trackers.table import withheld

FORCED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the generator shares its weights with the trainer: same process
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",  # a killed rank's last lines are in its log
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "INFO",  # what its start takes, in the rank's log
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait starve whatever else runs on the cores, up to 10x
}
# Of the flow and its hosts alone: engines know neither Prefect nor a tracker.
WITHHELD_VARIABLES = frozenset(
    {
        *(FLOW_KEYS, HOST_KEYS),
        *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"),
        *withheld(),
    }
)
AS_NVML_COUNTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # else CUDA's first GPU is the fastest, and not NVML's first
_CPU = {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


def environment_of(command: StartRanks, own: Interface, meet: MeetingPlace) -> dict[str, str]:
    """Return the environment that all ranks of a host share.

    Args:
        own: the interface that they keep to.
        meet: where the ranks of all hosts meet.

    Raises:
        UserError: a GPU is asked for that this host cannot see.
    """
    gpus = [place.gpu for place in command.ranks if place.gpu is not None]
    cores_per_rank = max(1, len(os.sched_getaffinity(0)) // len(command.ranks))
    settings = {
        "PENSTOCK_GROUP": command.group,
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(len(command.ranks)),
        "MASTER_PORT": str(meet.port),
        "PYTHONPATH": os.pathsep.join(_path(command)),
    }
    devices = AS_NVML_COUNTS | {"CUDA_VISIBLE_DEVICES": _visible_gpus(command.group, gpus)} if gpus else _CPU
    threads = {name: str(cores_per_rank) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}  # the second: tokenizers
    defaults = threads | _DEFAULTS | (compiled_code() if gpus else {})
    sockets = interface.variables(own, meet.address)
    return defaults | inherited() | FORCED_VARIABLES | sockets | settings | devices


def inherited() -> dict[str, str]:
    """Return this process's environment without what is of the flow alone."""
    return {name: value for name, value in os.environ.items() if name not in WITHHELD_VARIABLES}


def _path(command: StartRanks) -> list[str]:
    """Return what this host can import from, then what the flow can: wherever it was started, ranks find the same."""
    own = [entry or str(Path.cwd()) for entry in sys.path]
    return list(dict.fromkeys([*own, *(entry or command.folder for entry in command.path)]))


def compiled_code() -> dict[str, str]:
    """Where PyTorch keeps compiled code, until vLLM names a folder of its own when it compiles a model.

    PyTorch's default is a folder where temporary files are: in /tmp anyone could have made it first, with code for this
    user to load, and a program that removes its temporary files would compile all of it anew at each start.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"TORCHINDUCTOR_CACHE_DIR": str(caches / "penstock" / "inductor")}


def _visible_gpus(group: str, gpus: Sequence[int]) -> str:
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in outer.split(",") if name.strip()]
    if max(gpus) >= len(names):
        raise UserError(
            f"group {group!r} asks for GPU {max(gpus)}, but CUDA_VISIBLE_DEVICES={outer!r} shows {len(names)}",
            "GPU indices count from 0 among the visible ones: change the group's 'gpus' or CUDA_VISIBLE_DEVICES.",
        )
    return ",".join(names[gpu] for gpu in gpus)
