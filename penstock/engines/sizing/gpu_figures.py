"""What samples of a training's GPUs, on whatever machines they are, come to: utilisation, memory and clocks.

Left out: who takes samples (penstock/engines/groups/machine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

from penstock.engines.commands.hosts import GpuSample


def gpu_figures(samples: Mapping[str, Sequence[GpuSample]]) -> dict[str, float]:
    """Return mean utilisation and clock and highest memory over all samples, by host; nothing where there are none.

    Only clocks of busy samples count: an idle GPU's clock says nothing of the work. With several GPUs the mean clock of
    the slowest one is given as well.
    """
    everything = [sample for taken in samples.values() for sample in taken]
    if not everything:
        return {}
    return {
        "gpu/utilisation": mean(sample.busy for sample in everything),
        "gpu/memory_gib": max(sample.memory_gib for sample in everything),
        **_clocks((host, sample) for host, taken in samples.items() for sample in taken),
    }


def _clocks(samples: Iterable[tuple[str, GpuSample]]) -> dict[str, float]:
    of_gpus: dict[tuple[str, int], list[float]] = {}
    for host, sample in samples:
        if sample.busy:
            of_gpus.setdefault((host, sample.gpu), []).append(sample.clock_mhz)
    means = [mean(clocks) for clocks in of_gpus.values()]
    slowest = {"gpu/clock_mhz_min": min(means)} if len(means) > 1 else {}
    return {"gpu/clock_mhz": mean(means), **slowest} if means else {}
