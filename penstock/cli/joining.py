"""How a machine joins a training by itself: `penstock host`, under Slurm, on Kubernetes or by hand.

The keys are in the environment, the training's in one variable and its hosts' in another, so that a host cannot pose
as the training. Left out: what a host does (penstock/engines/groups/host.py).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import asdict

from penstock.base.errors import UserError
from penstock.engines.groups.channel import FLOW_KEYS, HOST_KEYS, Address, Keys
from penstock.engines.groups.host import HostStart
from penstock.engines.groups.placement import JOINING

NUMBERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # what Slurm and Kubernetes call a node of a job
NEW_KEYS = 'eval "$(penstock host --new-keys)"'


def print_new_keys() -> None:
    """Print commands for a shell that set the keys of one training and of its hosts."""
    keys = Keys.new()
    theirs = {name: value for name, value in asdict(keys).items() if name != "server_secret"}
    print(f"export {FLOW_KEYS}={shlex.quote(keys.to_text())}")
    print(f"export {HOST_KEYS}={shlex.quote(json.dumps(theirs))}")


def host_start(flow: str | None, number: int | None, interface: str | None, silence_s: float) -> HostStart:
    """Return what a host has to know, from the command line and the environment.

    Raises:
        UserError: it is not said where the training listens, which host this is, or there are no keys.
    """
    address, _, port = (flow or "").rpartition(":")
    if not address or not port.isdigit():
        raise UserError(
            f"'{flow}' does not say where the training listens" if flow else "nothing says where the training listens",
            "name hosts.address and hosts.port of its recipe: penstock host 10.0.0.1:5555",
        )
    if number is None:
        number = next((int(os.environ[name]) for name in NUMBERS if os.environ.get(name, "").isdigit()), None)
    if number is None:
        raise UserError("nothing says which host of the training this is", "number them from 0: --number 0")
    if HOST_KEYS not in os.environ:
        raise UserError(
            f"the environment has no {HOST_KEYS}",
            f"make keys where the training starts, for it and its hosts: {NEW_KEYS}",
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keys = Address(f"tcp://{address}:{port}", **json.loads(os.environ[HOST_KEYS]))
    return HostStart(f"{JOINING}/{number}", keys, interface, silence_s)
