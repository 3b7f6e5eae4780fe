"""Starts vLLM's real server for several folders: `python vllm_servers.py FOLDER PORT [FOLDER PORT ...]`.

Each server's command is that of `penstock serve`. What differs is how their processes start: one process imports vLLM,
and the servers and their engines are forks of it. That spares five imports, half a minute of the suite's time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path

USED = (
    "penstock.cli.serving.vllm_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


def main(pairs: list[str]) -> None:
    """Serve until killed."""
    from penstock.cli.serving.serve import server_command

    warnings.simplefilter("ignore")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # on a CPU: the engine's own process runs the model
    system = importlib.import_module("vllm.utils.system_utils")
    system.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    _, entry, *_ = [importlib.import_module(name) for name in USED]
    servers = []
    for folder, port in zip(pairs[::2], pairs[1::2], strict=True):
        if not (server := os.fork()):
            _, *sys.argv = server_command(Path(folder), int(port), None, 0)[2:]  # the module's name and its arguments
            entry.main()
            os._exit(0)
        servers.append(server)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # this session is theirs alone
    for server in servers:
        os.waitpid(server, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
