"""Bandwidth of the collectives that training and reshards use, per buffer size, against what the links could do.

Ranks are those of an engine group, so addresses, environment and devices are those of a training. Bus bandwidth is
the usual measure (NVIDIA's nccl-tests, PERFORMANCE.md): bytes that cross the busiest link per second, which a ring over
perfect links keeps at the link's rate whatever the number of ranks. Left out: several machines.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pynvml

from benchmarks.reporting.result import BenchResult, new_result
from engines.commands.message import Command, decode, decode_reply, encode, name_of
from engines.groups import interface
from engines.groups.channel import Tell
from engines.groups.group import EngineGroup, GroupSpec, RankDevice
from engines.groups.machine import visible_gpus
from penstock.base.errors import UserError
from penstock.reports.progress import TrainingProgress

Collective = Literal["all_gather", "broadcast", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
MIB = 1 << 20
WIDTH = 2  # bytes of a bfloat16
WARM_UP = 3
START_TIMEOUT_S, COMMAND_TIMEOUT_S, HEARTBEAT_TIMEOUT_S = 300.0, 300.0, 120.0
# GB/s of one link in one direction, by NVML's number of the NVLink version (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0).
LINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
LOOKS_LIKE_PCIE = 0.25  # below this share of NVLink's rate the data does not take it
PLATEAU = 0.9  # of the best bandwidth: from there on a larger bucket gains nothing that matters


@dataclass(frozen=True)
class Measured:
    """Median seconds of one collective on one rank."""

    seconds: float


@dataclass(frozen=True)
class Measure(Command[Measured]):
    """Run one collective over `size` bytes of bfloat16, after a warm-up `rounds` times.

    For an all-gather `size` counts what every rank holds afterwards.
    """

    collective: Collective
    size: int
    rounds: int


class Collectives:
    """A rank that runs collectives and nothing else."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        import torch

        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        interface.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out `Measure`, the only command."""
        return {"reply": encode(self._measured(decode(Measure, arguments, command)))}

    def _measured(self, asked: Measure) -> Measured:
        import torch

        share = asked.size // WIDTH // self.world_size
        buffer = torch.zeros(share * self.world_size, dtype=torch.bfloat16, device=self.device)
        own = buffer.narrow(0, self.rank * share, share)
        calls = {
            "all_gather": lambda: torch.distributed.all_gather_into_tensor(buffer, own),
            "broadcast": lambda: torch.distributed.broadcast(buffer, src=0),
            "all_reduce": lambda: torch.distributed.all_reduce(buffer),
        }
        call = calls[asked.collective]
        for _ in range(WARM_UP):
            call()
        torch.distributed.barrier()
        return Measured(statistics.median(self._seconds(call) for _ in range(asked.rounds)))

    def _seconds(self, call: Any) -> float:
        import torch

        if self.device.type == "cpu":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Leave the process group."""
        import torch

        torch.distributed.destroy_process_group()


def measure(command: str, *, largest_mib: int, rounds: int, ranks: int | None) -> BenchResult:
    """Measure every collective at 1, 4, 16, ... MiB up to `largest_mib`.

    Args:
        ranks: CPU ranks on a machine without a GPU; GPUs to use otherwise. None: all GPUs, or two CPU ranks.

    Raises:
        UserError: fewer than two ranks, or more than there are GPUs.
    """
    devices = _devices(ranks)
    sizes = [MIB * 4**power for power in range(16) if 4**power <= largest_mib]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, TrainingProgress() as progress:
        spec = GroupSpec(
            name="collectives",
            roles=(),
            devices=devices,
            log_dir=Path(scratch),
            start_timeout_s=START_TIMEOUT_S,
            command_timeout_s=COMMAND_TIMEOUT_S,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            worker="benchmarks.nccl:Collectives",
        )
        progress.phase(f"starting {len(devices)} ranks")
        with EngineGroup(spec) as group:
            group.wait_ready()
            progress.start(len(sizes) * len(COLLECTIVES))
            for collective in COLLECTIVES:
                for size in sizes:
                    rows.append(_row(group, collective, size, rounds))
                    progress.advance(len(rows), {})
    link = link_gb_per_s(len(devices)) if devices[0].gpu is not None else None
    best = {f"{name}_gb_per_s": max(row["bus_gb_per_s"] for row in rows_of(rows, name)) for name in COLLECTIVES}
    return new_result(
        "nccl",
        command,
        best | ({"link_gb_per_s": link} if link else {}),
        settings={"ranks": len(devices), "rounds": rounds, "dtype": "bfloat16", "verdict": verdict(rows, link)},
        details=rows,
    )


def _devices(ranks: int | None) -> tuple[RankDevice, ...]:
    gpus = len(visible_gpus())
    count = ranks or gpus or 2
    if gpus and count > gpus:
        raise UserError(f"--ranks asks for {count} GPUs, {gpus} are visible", "lower --ranks")
    if count < 2:
        raise UserError("a collective needs two ranks, and one GPU is visible", "use a machine with more GPUs")
    return tuple(RankDevice(index if gpus else None) for index in range(count))


def _row(group: EngineGroup, collective: Collective, size: int, rounds: int) -> dict[str, Any]:
    ranks = len(group.spec.devices)
    size -= size % (WIDTH * ranks)
    asked = Measure(collective, size, rounds)
    answers = group.call(name_of(Measure), key=f"{collective}/{size}", **encode(asked))
    replies = [decode_reply(Measure, answer["reply"]) for answer in answers]
    seconds = max(reply.seconds for reply in replies)  # a collective has ended where the last rank has it
    return {
        "collective": collective,
        "bytes": size,
        "seconds": seconds,
        "bus_gb_per_s": bus_bandwidth(collective, size, seconds, ranks) / 1e9,
    }


def bus_bandwidth(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Return bytes per second over the busiest link of a ring, by nccl-tests' factors."""
    factor = {"all_gather": (ranks - 1) / ranks, "broadcast": 1.0, "all_reduce": 2 * (ranks - 1) / ranks}
    return size / seconds * factor[collective]


def rows_of(rows: Sequence[Mapping[str, Any]], collective: str) -> list[Mapping[str, Any]]:
    """Return the rows of one collective, the smallest size first."""
    return [row for row in rows if row["collective"] == collective]


def link_gb_per_s(gpus: int) -> float | None:
    """Return what NVLink moves out of one GPU per second in GB, of the slowest of the first `gpus`; None without it."""
    pynvml.nvmlInit()
    return min(map(_nvlink_of, visible_gpus()[:gpus])) or None


def _nvlink_of(index: int) -> float:
    handle, total = pynvml.nvmlDeviceGetHandleByIndex(index), 0.0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
            version = pynvml.nvmlDeviceGetNvLinkVersion(handle, link) if active else 0
        except pynvml.NVMLError:  # this GPU has no such link
            continue
        total += LINK_GB_PER_S.get(version, 0.0)
    return total


def verdict(rows: Sequence[Mapping[str, Any]], link: float | None) -> str:
    """Return in one sentence whether the links are used, and from which bucket size on, judged by the all-gather.

    Args:
        rows: as in the result's details.
        link: GB/s out of one GPU; None where NVML knows no NVLink.
    """
    gathers = rows_of(rows, "all_gather")
    best = max(row["bus_gb_per_s"] for row in gathers)
    enough = min(row["bytes"] for row in gathers if row["bus_gb_per_s"] >= PLATEAU * best)
    largest = max(row["bytes"] for row in gathers)
    buckets = f"from {size_text(enough)} on: larger buckets gain nothing"
    if enough == largest:
        buckets = f"with {size_text(largest)}, the largest measured: larger buckets may gain more"
    if link is None:
        return f"all-gather reaches {best:.1f} GB/s {buckets}; the link's rate is not known (no NVLink)"
    if best < LOOKS_LIKE_PCIE * link:
        return (
            f"all-gather reaches {best:.0f} GB/s of NVLink's {link:.0f}: this looks like PCIe; "
            "check NCCL_P2P_DISABLE and nvidia-smi topo -m"
        )
    return f"all-gather reaches {best / link:.0%} of NVLink's {link:.0f} GB/s {buckets}"


def size_text(size: int) -> str:
    """Return bytes as MiB or GiB, rounded: sizes are powers of two less a remainder that ranks cannot share."""
    mib = round(size / MIB)
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:g} GiB"
