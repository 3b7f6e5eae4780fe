"""How busy the GPUs are and how much of their memory is in use, asked of the driver about once a second.

A thread in the flow's process; between two `take` calls it gathers samples of all its GPUs. NVML's utilisation is the
share of time in which any kernel ran, so a busy GPU may still compute slowly: that is what the MFU tells. The memory
is all that is in use on the GPU, also that of CUDA contexts, NCCL, captured graphs and other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pynvml

GIB = 1 << 30
Sample = tuple[float, float]  # share of time in use, 0 to 1; GiB in use


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
        """Return mean utilisation and highest memory of the last seconds; nothing if no sample was due in them."""
        since = time.monotonic() - last_s
        with self._lock:
            samples = [sample for when, sample in self._samples if when >= since]
            self._samples.clear()
        if not samples:
            return {}
        return {
            "gpu/utilisation": sum(busy for busy, _ in samples) / len(samples),
            "gpu/memory_gib": max(memory for _, memory in samples),
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
    """Return utilisation and GiB in use of the GPU with NVML index `gpu`; NVML is initialised."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return busy / 100, pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
