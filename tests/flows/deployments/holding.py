"""A flow that is admitted to one GPU slot of a machine without GPUs, and holds it until it is killed."""

from __future__ import annotations

import threading

from prefect import flow

from configs.schema import TrainConfig
from penstock.session.machines import admission

LEASE_S = 60.0  # the shortest that Prefect takes


@flow
def hold() -> None:
    """Hold the slot."""
    admission.visible_gpus = lambda: [0]
    admission.LEASE_S = LEASE_S
    with admission.admission(TrainConfig()):
        threading.Event().wait()
