"""Bandwidth of the collectives that training and reshards use, per buffer size, against what the links could do.

Ranks are those of an engine group, so addresses, environment and devices are those of a training. Bus bandwidth is
the usual measure (NVIDIA's nccl-tests, PERFORMANCE.md): bytes that cross the busiest link per second, which a ring over
perfect links keeps at the link's rate whatever the number of ranks. A rank's part lies in
penstock/engines/groups/links.py. Left out: several machines (`penstock doctor --pool`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.engines.groups.group import EngineGroup, RankDevice
from penstock.engines.groups.links import COLLECTIVES, MIB, Collective, bus_bandwidth, group_of, seconds_of
from penstock.engines.groups.machine import visible_gpus
from penstock.reports.progress import TrainingProgress

# GB/s of one link in one direction, by NVML's number of the NVLink version (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0).
LINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
LOOKS_LIKE_PCIE = 0.25  # below this share of NVLink's rate the data does not take it
PLATEAU = 0.9  # of the best bandwidth: from there on a larger bucket gains nothing that matters


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
        progress.phase(f"starting {len(devices)} ranks")
        with EngineGroup(group_of(devices, Path(scratch))) as group:
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
    size, seconds = seconds_of(group, collective, size, rounds)
    return {
        "collective": collective,
        "bytes": size,
        "seconds": seconds,
        "bus_gb_per_s": bus_bandwidth(collective, size, seconds, ranks) / 1e9,
    }


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
