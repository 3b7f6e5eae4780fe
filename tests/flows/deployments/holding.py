"""A flow that is admitted to one GPU slot of a pool, and holds it until it is killed."""

from __future__ import annotations

import threading

from prefect import flow

from penstock.configs.schema import TrainConfig
from penstock.session.machines import admission

POOL = "held"
GROUP = {"pool": POOL, "gpus": [0], "roles": ["actor", "rollout"]}
LEASE_S = 60.0  # the shortest that Prefect takes


@flow
def hold() -> None:
    """Hold the slot."""
    admission.gpus_of_pools = lambda _: {POOL: 1}
    admission.LEASE_S = LEASE_S
    with admission.admission(TrainConfig(groups={"main": GROUP}), "holding"):
        threading.Event().wait()
