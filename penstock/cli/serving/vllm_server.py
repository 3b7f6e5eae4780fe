"""vLLM's own server with OpenAI's API, without a store on the network.

    python -m penstock.cli.serving.vllm_server ARGUMENTS

The engine of some versions (0.26) opens a store of torch.distributed for itself alone, which listens on every address
of the machine and asks nobody who is there. Others (0.32) take a file, and from here all do. The engine is a process
of its own; Python imports this module there, too, however it is started.

Left out: everything else about the server, which is vLLM's.
"""

from __future__ import annotations

import runpy
import tempfile
from uuid import uuid4

from vllm.v1.executor import uniproc_executor


def file_store(ip: str, port: int) -> str:
    """Return where the one process of an engine meets itself; others may read the file at most."""
    return f"file://{tempfile.gettempdir()}/penstock_store_{uuid4().hex}"


uniproc_executor.get_distributed_init_method = file_store

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
