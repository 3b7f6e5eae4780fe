"""What this machine has, and how its GPUs are used: asked through NVML and psutil, so torch is not imported.

NVML's utilisation is the share of time in which any kernel ran, so a busy GPU may still compute slowly: that is what
the MFU tells. The memory in use is also that of CUDA contexts, NCCL, captured graphs and other processes. The clock
falls where a GPU reaches its limit of power or heat: two of the same kind then take different times for the same work,
and all wait for the slowest.

Left out: what samples of all machines come to (penstock/engines/sizing/gpu_figures.py).
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import psutil
import pynvml

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import GpuSample

HOPPER = (9, 0)  # compute capability
GIB = 1 << 30


def visible_gpus() -> list[int]:
    """Return NVML indices of the GPUs this process may use, in CUDA's order; empty without a driver.

    Raises:
        UserError: CUDA_VISIBLE_DEVICES names a GPU that is not here, or a slice of one (MIG).
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    everything = list(range(pynvml.nvmlDeviceGetCount()))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return everything
    found = (_index_of(name.strip(), everything) for name in allowed.split(","))
    return [index for index in found if index in everything]


def _index_of(name: str, everything: list[int]) -> int | None:
    """The NVML index that a part of CUDA_VISIBLE_DEVICES means: a number, or a UUID or the beginning of one."""
    if name.isdigit():
        return int(name)
    if not name.startswith(("GPU-", "MIG-")):
        return None  # -1 and the like: no GPU
    matching = [
        index
        for index in everything
        if str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))).startswith(name)
    ]
    if len(matching) != 1:
        what = "a slice of a GPU; ranks take whole ones" if name.startswith("MIG-") else f"{len(matching)} GPUs here"
        raise UserError(f"CUDA_VISIBLE_DEVICES names {name}: {what}", "name whole GPUs that 'nvidia-smi -L' lists")
    return matching[0]


def free_gpu_bytes(index: int) -> int:
    """Return free memory of the GPU with NVML index `index`."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).free)


def gpu_bytes(index: int) -> int:
    """Return all memory of the GPU with NVML index `index`, of which a driver keeps a little for itself."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total)


def gpu_name(index: int) -> str:
    """Return the product name of the GPU with NVML index `index`, e.g. "NVIDIA H200"."""
    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))


def gpu_uuid(index: int) -> str:
    """Return what tells the GPU with NVML index `index` from every other one."""
    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))


def free_host_bytes() -> int:
    """Return memory that programs on this machine can still take."""
    return int(psutil.virtual_memory().available)


def is_hopper(index: int) -> bool:
    """Whether the GPU with NVML index `index` is a Hopper GPU, for which there are kernels of its own."""
    pynvml.nvmlInit()
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
    return tuple(capability) == HOPPER


def has_gated_mlp(index: int) -> bool:
    """Whether the GPU with NVML index `index` is one for kernels/gated_mlp.py, and its kernels are installed."""
    return is_hopper(index) and importlib.util.find_spec("quack") is not None


class GpuSampler:
    """Context manager: a thread that samples the GPUs that it was told to watch, until the context ends.

    Args:
        every_s: seconds between samples.
        read: what gives a GPU's sample; NVML unless a test has its own.
    """

    def __init__(self, every_s: float = 1.0, read: Callable[[int], GpuSample] | None = None) -> None:
        self._every_s, self._read = every_s, read or read_gpu
        self._gpus: set[int] = set()  # NVML indices
        self._samples: list[tuple[float, GpuSample]] = []  # when, and what
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def watch(self, gpus: Iterable[int]) -> Self:
        """Sample these GPUs, too, by their NVML indices; the first ones begin the sampling."""
        with self._lock:
            self._gpus |= set(gpus)
        if self._gpus and self._thread.ident is None:
            self._thread.start()
        return self

    def take(self, last_s: float) -> list[GpuSample]:
        """Return the samples of the last seconds; each is given once, and older ones are dropped."""
        since = time.monotonic() - last_s
        with self._lock:
            recent = [sample for when, sample in self._samples if when >= since]
            self._samples.clear()
        return recent

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                gpus = sorted(self._gpus)
            try:
                samples = [self._read(gpu) for gpu in gpus]
            except pynvml.NVMLError:  # a slice of a GPU, or a driver that does not tell: training goes on without
                return
            now = time.monotonic()
            with self._lock:
                self._samples += [(now, sample) for sample in samples]


def read_gpu(gpu: int) -> GpuSample:
    """Return a sample of the GPU with NVML index `gpu`; NVML is initialised."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return GpuSample(gpu, busy / 100, pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, float(clock))
