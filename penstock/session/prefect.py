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

A server that is away: Prefect's client asks again for about a minute, and not at all where it is new. Prefect makes a
new one for each child flow, so a training would end in the second in which its server is started anew.

SIGTERM ends a training, wherever the main thread is when it comes. Prefect raises what it means at once, also in the
midst of its own code. While that begins a task run the exception becomes another one, and a cancelled training is
called failed; in a finaliser or a callback Python drops it, and the training goes on until Prefect kills it half a
minute later. So it waits until Prefect has given way to the training's own code, which takes milliseconds. Left out:
SIGINT, which Python raises itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prefect.client import base
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.utilities import engine
from rich.console import Console

from configs.schema import TrainConfig
from engines.groups.machine import visible_gpus
from engines.groups.placement import JOINING, place
from engines.groups.spec import LOCAL, RankDevice
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


@contextmanager
def held_once_free(limit: str, needed: int, stop: threading.Event) -> Iterator[bool]:
    """Hold slots of a limit once they are free; yields False, without them, if `stop` is set before.

    On a server that has no such limit there is nothing to wait for.
    """
    with ExitStack() as stack:
        while slots_of(limit) is not None and not stop.is_set():
            try:
                held_slots = concurrency(limit, occupy=needed, timeout_seconds=PATIENCE_S, lease_duration=LEASE_S)
                stack.enter_context(held_slots)
            except TimeoutError:
                continue
            break
        yield not stop.is_set()


def slots_needed(config: TrainConfig) -> dict[str, int]:
    """Return how many slots of which limit the engine groups take: one per GPU, one for a pool's machine without."""
    specs = place(config, len(visible_gpus()), Path(), gpus_of_pools(config))
    return slots_on(device for spec in specs for device in spec.devices if device.host == LOCAL or not spec.elastic)


def slots_on(devices: Iterable[RankDevice]) -> dict[str, int]:
    """Return how many slots of which limit some devices take."""
    taken: dict[str, set[int | None]] = {}
    for device in devices:
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


class _Connected:
    """Stands in for the attribute by which a client of Prefect knows that it has reached its server: each one has."""

    def __get__(self, client: object, kind: type) -> bool:
        return True

    def __set__(self, client: Any, value: bool) -> None:
        client.__dict__["_has_connected"] = value  # what the client goes by when this is over


@contextmanager
def patient_clients() -> Iterator[None]:
    """Let new clients of Prefect wait for its server, too; it has answered this process before."""
    clients: tuple[Any, ...] = (base.PrefectHttpxSyncClient, base.PrefectHttpxAsyncClient)
    for client in clients:
        client._has_connected = _Connected()
    try:
        yield
    finally:
        for client in clients:
            del client._has_connected


OWN = frozenset({"algorithms", "configs", "engines", "flows", "penstock", "tasks"})
AGAIN_S = 0.02
PATIENCE_S = 5.0  # with a server that does not answer, say


@contextmanager
def terminations_heard() -> Iterator[None]:
    """Let SIGTERM wait while Prefect's code runs, for `PATIENCE_S` at most."""
    replaced: Any = engine
    prefects: Any = replaced._prefect_sigterm_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != prefects:
        yield  # not Prefect's to begin with
        return
    came: list[float] = []

    def heard(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())
        if _runs_prefect(frame) and came[-1] - came[0] < PATIENCE_S:
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        prefects(number, frame)

    replaced._prefect_sigterm_handler = heard  # by which the flows below this one know that it is theirs
    signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        replaced._prefect_sigterm_handler = prefects
        signal.signal(signal.SIGTERM, prefects)


def _runs_prefect(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is Prefect's or the training's own is Prefect's."""
    while frame is not None:
        room = str(frame.f_globals.get("__name__")).partition(".")[0]
        if room in OWN:
            return False
        if room == "prefect":
            return True
        frame = frame.f_back
    return False
