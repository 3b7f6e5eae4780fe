"""How busy the GPUs are, how fast they run and how much of their memory is in use, asked of the driver each second.

A thread in the flow's process; between two `take` calls it gathers samples of all its GPUs. NVML's utilisation is the
share of time in which any kernel ran, so a busy GPU may still compute slowly: that is what the MFU tells. The memory
is all that is in use on the GPU, also that of CUDA contexts, NCCL, captured graphs and other processes. The clock falls
where a GPU reaches its limit of power or heat: two of the same kind then take different times for the same work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
        self._samples: list[tuple[float, Sample]] = []
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

        A clock counts where the GPU was busy: an idle one's says nothing of the work.
        """
        since = time.monotonic() - last_s
        with self._lock:
            samples = [sample for when, sample in self._samples if when >= since]
            self._samples.clear()
        if not samples:
            return {}
        clocks = [sample.clock_mhz for sample in samples if sample.busy]
        return {
            "gpu/utilisation": sum(sample.busy for sample in samples) / len(samples),
            "gpu/memory_gib": max(sample.memory_gib for sample in samples),
            **({"gpu/clock_mhz": sum(clocks) / len(clocks)} if clocks else {}),
        }

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                samples = [self._read(gpu) for gpu in self._gpus]
            except pynvml.NVMLError:  # a slice of a GPU, or a driver that does not tell: training goes on without
                return
            now = time.monotonic()
            with self._lock:
                self._samples += [(now, sample) for sample in samples]


def read_gpu(gpu: int) -> Sample:
    """Return a sample of the GPU with NVML index `gpu`; NVML is initialised."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return Sample(busy / 100, pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, float(clock))
