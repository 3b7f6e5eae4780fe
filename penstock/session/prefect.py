"""Admission: a whole training waits until its GPUs are free, before any engine starts.

The slots are a global concurrency limit of the Prefect server that `penstock deploy` creates, one per GPU. A training
holds all of its slots at once: two that each held a part would wait for each other for ever. It holds them by a lease,
which it renews: those of one that was killed come back when the lease ends. Left out: which GPU is whose (`groups`),
and machines; a limit counts, it does not place.

Child flows at the least cost: a training begins one for every iteration.

The GPUs wait meanwhile after a checkpoint; else they are at the next rollout (tasks/iteration/rollout.py), a quick one
of which would be over first. A child flow's own heartbeat costs half a second; the training's flow keeps its own. And a
server with SQLite refuses a request (503) when two writes meet, which happens to one child flow in twenty; Prefect's
client, which has no setting for it, would ask again after two seconds. Left out: fewer requests (Prefect makes eight
for a child flow).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.client import base
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from rich.console import Console

from configs.schema import TrainConfig
from engines.groups.machine import visible_gpus
from engines.groups.placement import place
from penstock.base.errors import UserError
from penstock.reports.progress import waiting

GPU_SLOTS = "gpus"

LEASE_S = 300.0  # renewed when three quarters are over, so a server may be away for a minute


@contextmanager
def admission(config: TrainConfig) -> Iterator[None]:
    """Hold one slot per GPU of this training; free on CPU ranks, and on a server that knows no such limit.

    Raises:
        UserError: the training needs more GPUs than there are slots.
    """
    needed = gpus_needed(config)
    slots = gpu_slots() if needed else None
    if slots is None:
        yield
        return
    if needed > slots:
        raise UserError(
            f"this training needs {needed} GPUs, the concurrency limit '{GPU_SLOTS}' is {slots}",
            f"run 'penstock deploy' on the GPU machine, or 'prefect gcl update {GPU_SLOTS} --limit {needed}'",
        )
    with ExitStack() as stack:
        with waiting(Console(), f"waiting for {needed} of {slots} GPU slots (concurrency limit '{GPU_SLOTS}')"):
            stack.enter_context(concurrency(GPU_SLOTS, occupy=needed, lease_duration=LEASE_S))
        yield


def gpus_needed(config: TrainConfig) -> int:
    """Return the number of GPUs that the engine groups will take on this machine."""
    specs = place(config, len(visible_gpus()), Path())
    return len({device.gpu for spec in specs for device in spec.devices if device.gpu is not None})


def gpu_slots() -> int | None:
    """Return the slots of the server's limit, or None where it has none."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(GPU_SLOTS).limit
        except ObjectNotFound:
            return None


SOONER = 32  # the first of the doubling waits is then 1/16 s

MORE_RETRIES = 5  # doublings that make up for it: the client is as patient as before


@contextmanager
def quick_child_flows() -> Iterator[None]:
    """Begin child flows without a heartbeat of their own, and again at once where the server refuses at first."""
    original, retries = base.clamped_poisson_interval, PREFECT_CLIENT_MAX_RETRIES.value() + MORE_RETRIES
    settings = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_CLIENT_MAX_RETRIES: retries}

    def sooner(average_interval: float, clamping_factor: float = 0.3) -> float:
        return original(average_interval / SOONER, clamping_factor)

    base.clamped_poisson_interval = sooner
    try:
        with temporary_settings(settings):
            yield
    finally:
        base.clamped_poisson_interval = original
