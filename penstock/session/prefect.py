"""Child flows at the least cost: a training begins one for every iteration.

The GPUs wait meanwhile after a checkpoint; else they are at the next rollout (penstock/tasks/iteration/rollout.py), a
quick one of which would be over first. A child flow's own heartbeat costs half a second; the training's flow keeps its
own. And a server with SQLite refuses a request (503) when two writes meet, which happens to one child flow in twenty;
Prefect's client, which has no setting for it, would ask again after two seconds. Left out: fewer requests (Prefect
makes eight for a child flow).

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
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from prefect.client import base
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.utilities import engine

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


OWN = frozenset({"penstock"})
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
