"""Admission: a whole training waits until its GPUs are free, before any engine starts.

The slots are a global concurrency limit of the Prefect server that `penstock deploy` creates, one per GPU. A training
holds all of its slots at once: two that each held a part would wait for each other for ever. It holds them by a lease,
which it renews: those of one that was killed come back when the lease ends. Left out: which GPU is whose (`groups`),
and machines; a limit counts, it does not place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from rich.console import Console

from configs.errors import UserError
from configs.schema import TrainConfig
from engines.machine import visible_gpus
from engines.placement import place
from reports.progress import waiting

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
