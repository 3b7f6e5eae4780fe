"""What a flow asks of the hosts of its ranks, and what they reply; commands to ranks reach them past their host.

What a host tells unasked, that it is there and that a rank has ended, is no reply (penstock/engines/groups/host.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Dial:
    """Where a process dials its flow, and the keys that let it in (`penstock.engines.groups.channel.Address`)."""

    endpoint: str
    server_public: str
    client_public: str
    client_secret: str


@dataclass(frozen=True)
class RankPlace:
    """A rank of a host. `gpu` counts among the GPUs that the host may see; None: CPU."""

    rank: int
    gpu: int | None


@dataclass(frozen=True)
class MeetingPlace:
    """Address and port of the store in which the ranks of a group meet."""

    address: str
    port: int


@dataclass(frozen=True)
class StartRanks(Command[MeetingPlace]):
    """Start those ranks of a group that belong to this host; the reply comes once their processes are there.

    Attributes:
        epoch: of the group's ranks: those of another epoch are others.
        ranks: of this host, in rank order.
        world_size: ranks of the whole group.
        worker: class of the worker, as "module:Class".
        dial: where the ranks dial.
        meet: where they meet; None on the host of rank 0, which chooses.
        log_dir: folder of their logs.
        folder: working directory of the flow.
        path: what the flow can import from.
    """

    group: str
    epoch: int
    ranks: list[RankPlace]
    world_size: int
    worker: str
    dial: Dial
    meet: MeetingPlace | None
    log_dir: str
    folder: str
    path: list[str]


@dataclass(frozen=True)
class KeepReserve(Command[None]):
    """Start a process beside each of this host's ranks of a group, which imports `module` and waits.

    The group's next ranks here are these, if they live then.
    """

    group: str
    epoch: int
    module: str


@dataclass(frozen=True)
class EndRanks(Command[None]):
    """End this host's ranks of a group: wait for them to leave, then SIGTERM, then SIGKILL with all they started."""

    group: str
    epoch: int
    grace_s: float


@dataclass(frozen=True)
class KillRanks(Command[None]):
    """SIGKILL this host's ranks of a group with all that they have started."""

    group: str
    epoch: int


@dataclass(frozen=True)
class TellStacks(Command[dict[int, str]]):
    """Reply with the Python stacks of this host's ranks of a group, by rank."""

    group: str
    epoch: int


@dataclass(frozen=True)
class TellLog(Command[str]):
    """Reply with the end of a rank's log."""

    group: str
    epoch: int
    rank: int


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that a host may use: its product and number, free memory in bytes, if it has the gated MLP's kernels."""

    name: str
    uuid: str
    free_bytes: int
    gated_mlp: bool


@dataclass(frozen=True)
class HostFacts:
    """What the machine of a host has at this moment.

    Attributes:
        machine: its name.
        interface: network interface by which its ranks talk to others; `address` is its own there.
        cores: processors that this host may use.
        free_bytes: memory that programs can still take; `shm_bytes` likewise in /dev/shm.
        gpus: those that its ranks may use, in CUDA's order.
        versions: of Python and of the libraries whose results must agree.
        clock_s: seconds since the epoch, by this machine's clock.
    """

    machine: str
    interface: str
    address: str
    cores: int
    free_bytes: int
    shm_bytes: int
    gpus: list[GpuFacts]
    versions: dict[str, str]
    clock_s: float


@dataclass(frozen=True)
class TellFacts(Command[HostFacts]):
    """Reply with what this machine has."""


@dataclass(frozen=True)
class SlotFacts:
    """A slot of a rank: where it opens it, and of what it holds the state after which number; None: of nothing whole.

    `of` is "iteration", or "step" where nothing is generated.
    """

    group: str
    rank: int
    path: str
    of: str
    number: int | None


@dataclass(frozen=True)
class TellSlots(Command[list[SlotFacts]]):
    """Reply with the slots of all ranks that were ever started here."""


@dataclass(frozen=True)
class WrittenSlot:
    """A file that a slot was copied to: its name, its SHA-256 and its bytes."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class WriteSlots(Command[list[WrittenSlot]]):
    """Copy the slots with a snapshot to files in `folder`; the reply comes once the disk has them."""

    of: str
    number: int
    folder: str


@dataclass(frozen=True)
class GpuSample:
    """What a GPU was at one moment.

    Attributes:
        gpu: its NVML index on its machine.
        busy: share of the time in which a kernel ran, 0 to 1.
        memory_gib: in use.
        clock_mhz: of its multiprocessors.
    """

    gpu: int
    busy: float
    memory_gib: float
    clock_mhz: float


@dataclass(frozen=True)
class TakeGpuSamples(Command[list[GpuSample]]):
    """Reply with the samples of the last seconds of all GPUs that this host's ranks hold; each is given once."""

    last_s: float


@dataclass(frozen=True)
class ProveFolder(Command[str]):
    """Reply with the text of file `read`, empty where there is none, and write `text` to file `write`.

    So flow and host see that a path means the same folder to both.
    """

    read: str
    write: str
    text: str


@dataclass(frozen=True)
class Written:
    """A file that a host has written: seconds until the disk had it, and its SHA-256."""

    seconds: float
    sha256: str


@dataclass(frozen=True)
class WriteFile(Command[Written]):
    """Write a file of `size` random bytes, and reply once the disk has it."""

    path: str
    size: int
