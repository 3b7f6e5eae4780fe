"""Child flows at the least cost: a training begins one for every iteration.

The GPUs wait meanwhile after a checkpoint; else they are at the next rollout (tasks/rollout.py), a quick one of which
would be over first. A child flow's own heartbeat costs half a second; the training's flow keeps its own. And a server
with SQLite refuses a request (503) when two writes meet, which happens to one child flow in twenty; Prefect's client,
which has no setting for it, would ask again after two seconds. Left out: fewer requests (Prefect makes eight for a
child flow).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client import base
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

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
