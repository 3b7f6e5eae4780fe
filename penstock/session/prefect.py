"""Admission: a whole training waits until its GPUs are free, before any engine starts.

The slots are global concurrency limits of the Prefect server that `penstock deploy` creates, one slot per GPU: a limit
for the machine that trains, one for each pool of others. A training holds all of its slots at once: two that each held
a part would wait for each other for ever. It holds them by a lease, which it renews: those of one that was killed come
back when the lease ends. Left out: which GPU is whose (`groups`); a limit counts, it does not place.

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
from engines.groups.placement import JOINING, place
from engines.groups.spec import LOCAL
from penstock.base.errors import UserError
from penstock.reports.progress import waiting
from penstock.session.pools import gpus_of_pools

GPU_SLOTS = "gpus"

LEASE_S = 300.0  # renewed when three quarters are over, so a server may be away for a minute


@contextmanager
def admission(config: TrainConfig) -> Iterator[None]:
    """Hold the slots of all GPUs of this training; free on CPU ranks of this machine, and where there is no such limit.

    Limits are waited for in the order of their names: two trainings never each hold what the other waits for.

    Raises:
        UserError: the training needs more GPUs than there are slots.
    """
    with ExitStack() as stack:
        for limit, needed in sorted(slots_needed(config).items()):
            stack.enter_context(held(limit, needed))
        yield


@contextmanager
def held(limit: str, needed: int) -> Iterator[None]:
    """Hold slots of a limit, once they are free; nothing where the server has no such limit.

    Raises:
        UserError: the limit has fewer.
    """
    slots = slots_of(limit)
    if slots is None:
        yield
        return
    if needed > slots:
        raise UserError(
            f"this training needs {needed} GPUs, the concurrency limit '{limit}' is {slots}",
            f"{_remedy(limit)}, or 'prefect gcl update {limit} --limit {needed}'",
        )
    with ExitStack() as stack:
        with waiting(Console(), f"waiting for {needed} of {slots} GPU slots (concurrency limit '{limit}')"):
            stack.enter_context(concurrency(limit, occupy=needed, lease_duration=LEASE_S))
        yield


def slots_needed(config: TrainConfig) -> dict[str, int]:
    """Return how many slots of which limit the engine groups take: one per GPU, one for a pool's machine without."""
    specs = place(config, len(visible_gpus()), Path(), gpus_of_pools(config))
    taken: dict[str, set[int | None]] = {}
    for device in (device for spec in specs for device in spec.devices):
        taken.setdefault(device.host, set()).add(device.gpu)
    needed: dict[str, int] = {}
    for host, gpus in taken.items():
        pool = host.rpartition("/")[0]
        if pool == JOINING or (host == LOCAL and None in gpus):
            continue  # nobody counts these
        limit = GPU_SLOTS if host == LOCAL else limit_of(pool)
        needed[limit] = needed.get(limit, 0) + len(gpus)
    return needed


def limit_of(pool: str) -> str:
    """Return the name of the concurrency limit of a pool's GPUs."""
    return f"{GPU_SLOTS}-{pool}"


def _remedy(limit: str) -> str:
    if limit == GPU_SLOTS:
        return "run 'penstock deploy' on the GPU machine"
    return f"run 'penstock deploy --pool {limit.removeprefix(limit_of(''))} --hosts N --gpus M'"


def slots_of(limit: str) -> int | None:
    """Return the slots of a limit of the server, or None where it has no such limit."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(limit).limit
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
