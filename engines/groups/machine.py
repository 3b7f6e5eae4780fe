"""What this machine has: visible GPUs and free memory. Asked through NVML and psutil, so torch is not imported."""

from __future__ import annotations

import importlib.util
import os

import psutil
import pynvml

from penstock.base.errors import UserError

HOPPER = (9, 0)  # compute capability


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


def has_gated_mlp(index: int) -> bool:
    """Whether the GPU with NVML index `index` is one for kernels/gated_mlp.py, and its kernels are installed."""
    pynvml.nvmlInit()
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
    return tuple(capability) == HOPPER and importlib.util.find_spec("quack") is not None
