"""lm-evaluation-harness on vLLM: its own command, with an engine that opens no store on the network.

    python -m penstock.cli.serving.vllm_harness run ARGUMENTS

The harness asks which version of the package `vllm` is installed, and the build for CPUs has another name. Here both
are answered. Its engine is a process of its own, which imports this module, too, and meets itself in a file
(penstock/cli/serving/vllm_server.py).

Left out: everything else, which is the harness's own.
"""

from __future__ import annotations

import importlib.metadata as metadata
import runpy

import vllm

from penstock.cli.serving import vllm_server

version_of = metadata.version


def version(distribution_name: str) -> str:
    """Return the version of a distribution; of vLLM that of the package, whatever its build is called."""
    return str(vllm.__version__) if distribution_name == "vllm" else version_of(distribution_name)


if __name__ == "__main__":
    assert vllm_server.file_store is not None  # imported for what it sets
    metadata.version = version
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
