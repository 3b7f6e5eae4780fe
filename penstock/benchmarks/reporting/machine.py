"""What a result file says about where and how it was measured. NVML is asked, so no CUDA context is made for it."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import pynvml

from penstock.base.provenance import commit, versions
from penstock.engines.groups.machine import visible_gpus


def provenance(command: str) -> dict[str, Any]:
    """Return command, commit, machine and versions."""
    return {"command": command, "commit": commit(), "machine": machine(), "versions": versions()}


def machine() -> str:
    """Return a line about processor or GPUs."""
    if gpus := visible_gpus():
        return f"{len(gpus)} x {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(gpus[0]))}"
    return f"CPU, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def kind_of(line: str) -> str:
    """Return the line of a machine without its number of GPUs; of one without any, that."""
    return "CPU" if line.startswith("CPU") else re.sub(r"^\d+ x ", "", line)
