"""What this machine has: visible GPUs and free memory. Asked through NVML and psutil, so torch is not imported."""

from __future__ import annotations

import os

import psutil
import pynvml


def visible_gpus() -> list[int]:
    """Return NVML indices of the GPUs this process may use, in CUDA's order; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    everything = list(range(pynvml.nvmlDeviceGetCount()))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return everything
    return [int(index) for index in allowed.split(",") if index.strip().isdigit() and int(index) in everything]


def free_gpu_bytes(index: int) -> int:
    """Return free memory of the GPU with NVML index `index`."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).free)


def gpu_name(index: int) -> str:
    """Return the product name of the GPU with NVML index `index`, e.g. "NVIDIA H200"."""
    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))


def free_host_bytes() -> int:
    """Return memory that programs on this machine can still take."""
    return int(psutil.virtual_memory().available)
