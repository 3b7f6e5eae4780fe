"""The clock of iterations: each begins where the one before ended, so that what lies between them is counted too.

That is its record, and what Prefect needs to end a child flow and to begin one. Checkpoints are left out: their seconds
are a figure of their own. Not a task.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.session import Training


def lap(training: Training) -> float:
    """Return the seconds since the last lap ended, without those left out; the next lap begins."""
    session, now = training.session(), time.perf_counter()
    seconds, session.lap_began = now - session.lap_began, now
    return seconds


@contextmanager
def out_of_lap(training: Training) -> Iterator[None]:
    """Leave the seconds of the block out of the lap."""
    begin = time.perf_counter()
    yield
    training.session().lap_began += time.perf_counter() - begin
