"""A host in a run of Prefect: started below it, named after its machine, and ended with it or with its training.

Prefect ends neither the processes that a run starts nor the children of a run that crashes. So the host is below a
keeper, which ends with this process, and the training's run is looked at while the host serves it.

Left out: what a host does (penstock/engines/groups/host.py).
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
from contextlib import suppress
from uuid import UUID

import httpx
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.states import Cancelled

from penstock.engines.groups.host import HostStart
from penstock.engines.groups.hosts import start_host
from penstock.engines.groups.interface import Interface, named, towards
from penstock.engines.groups.machine import visible_gpus
from penstock.session.machines.pools import start_of

LOOK_S = 3.0
LAST_LINES = 5


def serve_training(host: str, secret: str) -> None:
    """Serve a training until it ends, in whatever way.

    Raises:
        UserError: this machine has no such interface or no way to the training.
        RuntimeError: the training fell silent, or the host failed; with its last lines.
    """
    start = start_of(secret)
    interface = check_way(start)
    _name_run(host, interface)
    with tempfile.TemporaryFile("w+b") as log:
        keeper = start_host(start, log)
        try:
            code = _watch(keeper)
        finally:
            keeper.terminate()
            keeper.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    for line in said:
        get_run_logger().info("%s", line)
    _confirm_cancelled()
    if code:
        raise RuntimeError(f"host {host} has ended: {' / '.join(said) or f'exit code {code}'}")


def check_way(start: HostStart) -> Interface:
    """Return the interface by which ranks will talk.

    Raises:
        UserError: this machine does not have it, or no route to the training.
    """
    flow = start.address.endpoint.removeprefix("tcp://").rpartition(":")[0]
    return named(start.interface) if start.interface else towards(flow)


def _name_run(host: str, interface: Interface) -> None:
    """Let the run's name say which machine it is, and what that has."""
    gpus = len(visible_gpus())
    name = f"{host} on {socket.gethostname()} ({interface.address}): {f'{gpus} GPUs' if gpus else 'CPU'}"
    with get_client(sync_client=True) as client:
        client.set_flow_run_name(UUID(str(runtime.flow_run.id)), name)


def _watch(keeper: subprocess.Popen[bytes]) -> int:
    """Return the host's exit code when it has ended; 0 when the training's run is over, whose crash tells no host."""
    parent = runtime.flow_run.parent_flow_run_id
    while keeper.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(LOOK_S)
        if keeper.returncode is None and parent is not None and _is_over(UUID(str(parent))):
            with suppress(subprocess.TimeoutExpired):
                keeper.wait(LOOK_S)  # the training lets its hosts go by itself, if it can
            return 0
    return int(keeper.returncode)


def _confirm_cancelled() -> None:
    """End this run if it is being cancelled.

    Its worker would do that, but hears of no cancelling any more once Prefect's server was away for half a minute.
    """
    flow_run_id = UUID(str(runtime.flow_run.id))
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
        if state is not None and state.is_cancelling():
            client.set_flow_run_state(flow_run_id, Cancelled(message=state.message), force=True)


def _is_over(flow_run_id: UUID) -> bool:
    """Whether the server says so; while it is away the host watches the training by itself, by its silence."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
    except httpx.TransportError as error:
        get_run_logger().warning("Prefect's server is not reached: %s", error)
        return False
    return state is not None and state.is_final()
