"""Engine host: the run that a work pool's machine gives to a training, for as long as that lasts.

    keys -> host -> (the training's commands) -> over

It is a child of the training's flow run. Left out: what a host does (penstock/engines/groups/host.py).
"""

from __future__ import annotations

from prefect import flow

from penstock.session.machines.serving_host import serve_training


@flow(name="engine-host", flow_run_name="{host}")
def engine_host(host: str, secret: str) -> None:
    """Start, watch and end the ranks of a training on this machine.

    Args:
        host: its name in the training.
        secret: Prefect block with the training's address and keys.
    """
    serve_training(host, secret)
