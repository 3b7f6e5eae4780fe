"""What an engine group is: its ranks, each on a device of some host, and its deadlines.

Left out: which groups a training needs (placement.py), and starting their ranks (hosts.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a rank imports this file before it says hello, and needs no pydantic for that
    from penstock.configs.sections.run import Role

START_KEY = "start"  # the key under which a rank replies how building its worker went
LOCAL = "local"  # the host that the flow starts on its own machine


@dataclass(frozen=True)
class RankDevice:
    """Where one rank computes.

    Attributes:
        gpu: counts among the GPUs that the rank's host may see; None is a CPU rank.
        host: name of the host, e.g. "h200/0" for the first one of the pool h200.
    """

    gpu: int | None
    host: str = LOCAL


@dataclass(frozen=True)
class GroupSpec:
    """What an engine group is: one rank per device, their log folder and their deadlines (seconds).

    Ranks of one host are neighbours. `worker` names the class that holds the models, as "module:Class"; see
    `penstock.engines.groups.rank.Worker` for its shape. An `elastic` group comes and goes while the training runs.
    """

    name: str
    roles: tuple[Role, ...]
    devices: tuple[RankDevice, ...]
    log_dir: Path
    start_timeout_s: float
    command_timeout_s: float
    heartbeat_timeout_s: float
    worker: str = "penstock.engines.ranks.worker:Worker"
    elastic: bool = False

    def __post_init__(self) -> None:
        if len({device.gpu is None for device in self.devices}) != 1:
            raise ValueError(f"engine group {self.name!r} needs devices, and either all GPUs or all CPU")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The group's hosts, in the order of their ranks."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def ranks_on(self, host: str) -> list[int]:
        """Return the numbers of the ranks of one host."""
        return [rank for rank, device in enumerate(self.devices) if device.host == host]

    def log_file(self, rank: int) -> Path:
        """Return where a rank writes what it prints."""
        return self.log_dir / f"{self.name}-rank{rank}.log"


def device_name(device: RankDevice) -> str:
    """Return what a rank's device is called on its host."""
    return "CPU" if device.gpu is None else f"GPU {device.gpu}"


def placed(devices: tuple[RankDevice, ...]) -> str:
    """Return in words where the ranks of a group are.

    >>> placed((RankDevice(0), RankDevice(1)))
    'GPU 0, GPU 1'
    >>> placed((RankDevice(None, "h200/0"), RankDevice(None, "h200/1")))
    'h200/0: CPU; h200/1: CPU'
    """
    by_host: dict[str, list[str]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device_name(device))
    here = [", ".join(by_host.pop(LOCAL))] if LOCAL in by_host else []
    return "; ".join([*here, *(f"{host}: {', '.join(names)}" for host, names in by_host.items())])
