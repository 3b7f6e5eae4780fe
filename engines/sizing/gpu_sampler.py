"""How busy the GPUs are, how fast they run and how much of their memory is in use, asked of the driver each second.

A thread in the flow's process; between two `take` calls it gathers samples of all its GPUs. NVML's utilisation is the
share of time in which any kernel ran, so a busy GPU may still compute slowly: that is what the MFU tells. The memory
is all that is in use on the GPU, also that of CUDA contexts, NCCL, captured graphs and other processes. The clock falls
where a GPU reaches its limit of power or heat: two of the same kind then take different times for the same work, and
all wait for the slowest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import mean
from types import TracebackType
from typing import NamedTuple, Self

import pynvml

GIB = 1 << 30


class Sample(NamedTuple):
    """What a GPU was at one moment."""

    busy: float  # share of the time in which a kernel ran, 0 to 1
    memory_gib: float  # in use
    clock_mhz: float  # of its multiprocessors


class GpuSampler:
    """Context manager: samples GPUs until it ends.

    Args:
        gpus: NVML indices.
        every_s: seconds between samples.
        read: what gives a GPU's sample; NVML unless a test has its own.
    """

    def __init__(self, gpus: list[int], every_s: float = 1.0, read: Callable[[int], Sample] | None = None) -> None:
        self._gpus, self._every_s, self._read = gpus, every_s, read or read_gpu
        self._samples: list[tuple[float, int, Sample]] = []  # when, of which GPU
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def take(self, last_s: float) -> dict[str, float]:
        """Return mean utilisation and clock and highest memory of the last seconds; nothing without a sample in them.

        Only clocks of busy samples count: an idle GPU's clock says nothing of the work. With several GPUs the mean
        clock of the slowest one is given as well.
        """
        since = time.monotonic() - last_s
        with self._lock:
            recent = [(gpu, sample) for when, gpu, sample in self._samples if when >= since]
            self._samples.clear()
        if not recent:
            return {}
        return {
            "gpu/utilisation": mean(sample.busy for _, sample in recent),
            "gpu/memory_gib": max(sample.memory_gib for _, sample in recent),
            **_clocks(recent),
        }

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                samples = [self._read(gpu) for gpu in self._gpus]
            except pynvml.NVMLError:  # a slice of a GPU, or a driver that does not tell: training goes on without
                return
            now = time.monotonic()
            with self._lock:
                self._samples += [(now, gpu, sample) for gpu, sample in zip(self._gpus, samples, strict=True)]


def _clocks(samples: list[tuple[int, Sample]]) -> dict[str, float]:
    of_gpus: dict[int, list[float]] = {}
    for gpu, sample in samples:
        if sample.busy:
            of_gpus.setdefault(gpu, []).append(sample.clock_mhz)
    means = [mean(clocks) for clocks in of_gpus.values()]
    slowest = {"gpu/clock_mhz_min": min(means)} if len(means) > 1 else {}
    return {"gpu/clock_mhz": mean(means), **slowest} if means else {}


def read_gpu(gpu: int) -> Sample:
    """Return a sample of the GPU with NVML index `gpu`; NVML is initialised."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return Sample(busy / 100, pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, float(clock))
