"""Waiting with a deadline, on a clock that stands still while the machine is taken away.

A deadline in a test guards against hanging. The host of a virtual machine may give its processors to others, and then
nothing here runs for seconds on end; Linux counts that time as stolen, and it counts towards no deadline. On a machine
that has its processors to itself the clock is the usual one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

FIRST_PAUSE_S = 0.02  # before a second look; most of what tests wait for is a matter of some hundredths


def came_true(condition: Callable[[], Any], within_s: float, every_s: float = 0.25) -> bool:
    """Wait for `condition`, looked at often in the beginning and then every so often; return whether it came true."""
    deadline, pause_s = _own_s() + within_s, min(FIRST_PAUSE_S, every_s)
    while not condition():
        if _own_s() >= deadline:
            return bool(condition())
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, every_s)
    return True


def until(condition: Callable[[], Any], within_s: float, what: str, every_s: float = 0.25) -> None:
    """Wait for `condition`, at most `within_s`; `what` says what did not happen."""
    assert came_true(condition, within_s, every_s), f"not within {within_s:g} s: {what}"


def _own_s() -> float:
    """Return the seconds of a clock, less those that a processor of this machine was taken away on average."""
    stolen_s = getattr(psutil.cpu_times(), "steal", 0.0)  # of all processors together; Linux alone counts it
    return time.monotonic() - stolen_s / (psutil.cpu_count() or 1)
