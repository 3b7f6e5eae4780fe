"""Admission: a whole training waits until its GPUs are free, before any engine starts.

GPUs of this machine are claimed one by one (claims.py). Those of a pool's machines are slots of a global concurrency
limit of the Prefect server, which `penstock deploy --pool` creates, one slot per GPU. A training holds all of them at
once: two that each held a part would wait for each other for ever. It holds slots by a lease, which it renews: those of
one that was killed come back when the lease ends. Left out: which GPU of a pool is whose; a limit counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from rich.console import Console

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import JOINING, place
from penstock.engines.groups.spec import LOCAL, RankDevice
from penstock.reports.progress import waiting
from penstock.session.machines.claims import Claims, claimed, wanted_by
from penstock.session.machines.pools import gpus_of_pools

AGAIN_S, BUSY_TRIES = 2.0, 10  # with a server that is too busy to say whether slots are free
LOOK_S = 5.0  # between two looks at whether anybody still waits
LEASE_S = 300.0  # renewed when three quarters are over, so a server may be away for a minute


@contextmanager
def admission(config: TrainConfig, who: str, say: Callable[[str], object] = lambda _: None) -> Iterator[Claims]:
    """Have all GPUs of this training; free on CPU ranks of this machine, and where a pool has no limit.

    Those of this machine are waited for first, then limits in the order of their names: two trainings never each hold
    what the other waits for.

    Args:
        who: what others are told of who has them.
        say: told what is waited for on this machine, and what was got.

    Raises:
        UserError: the training needs more GPUs than there are.
    """
    slots = slots_needed(config)
    with ExitStack() as stack:
        claims = stack.enter_context(claimed(wanted_by(config), who, say))
        for limit, needed in sorted(slots.items()):
            stack.enter_context(held(limit, needed))
        yield claims


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
            f"run 'penstock deploy --pool {limit.removeprefix(limit_of(''))} --hosts N --gpus M', "
            f"or 'prefect gcl update {limit} --limit {needed}'",
        )
    with ExitStack() as stack:
        with waiting(Console(), f"waiting for {needed} of {slots} GPU slots (concurrency limit '{limit}')"):
            tries = 1
            while not _acquired(stack, limit, needed, tolerates_busy=tries < BUSY_TRIES):
                time.sleep(AGAIN_S)
                tries += 1
        yield


@contextmanager
def held_once_free(limit: str, needed: int, stop: threading.Event) -> Iterator[bool]:
    """Hold slots of a limit once they are free; yields False, without them, if `stop` is set before.

    On a server that has no such limit there is nothing to wait for.
    """
    with ExitStack() as stack:
        while slots_of(limit) is not None and not stop.is_set():
            try:
                if _acquired(stack, limit, needed, timeout_seconds=LOOK_S):
                    break
            except TimeoutError:
                continue
            stop.wait(AGAIN_S)
        yield not stop.is_set()


def _acquired(
    stack: ExitStack, limit: str, needed: int, timeout_seconds: float | None = None, tolerates_busy: bool = True
) -> bool:
    """Hold slots from now on, once they are free; False if the server was too busy to give them.

    Raises:
        TimeoutError: they are not free within the time.
        ConcurrencySlotAcquisitionError: as for False, where that is not tolerated.
    """
    try:
        slots = concurrency(limit, occupy=needed, timeout_seconds=timeout_seconds, lease_duration=LEASE_S)
        stack.enter_context(slots)
    except ConcurrencySlotAcquisitionError:
        if not tolerates_busy:
            raise
        return False
    return True


def slots_needed(config: TrainConfig) -> dict[str, int]:
    """Return how many slots of which limit the engine groups take: one per GPU, one for a pool's machine without.

    Raises:
        UserError: there are not so many GPUs.
    """
    specs = place(config, len(visible_gpus()), Path(), gpus_of_pools(config))
    return slots_on(device for spec in specs for device in spec.devices if not spec.elastic)


def slots_on(devices: Iterable[RankDevice]) -> dict[str, int]:
    """Return how many slots of which limit some devices take."""
    taken: dict[str, set[int | None]] = {}
    for device in devices:
        taken.setdefault(device.host, set()).add(device.gpu)
    needed: dict[str, int] = {}
    for host, gpus in taken.items():
        pool = host.rpartition("/")[0]
        if host != LOCAL and pool != JOINING:  # nobody counts those that join by themselves
            needed[limit_of(pool)] = needed.get(limit_of(pool), 0) + len(gpus)
    return needed


def limit_of(pool: str) -> str:
    """Return the name of the concurrency limit of a pool's GPUs."""
    return f"gpus-{pool}"


def slots_of(limit: str) -> int | None:
    """Return the slots of a limit of the server, or None where it has no such limit."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(limit).limit
        except ObjectNotFound:
            return None
