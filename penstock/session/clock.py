"""The clock of iterations, and when each task ran by it.

An iteration begins where the one before ended, so that what lies between two of them is counted, too: the record, and
what Prefect needs to end a child flow and to begin another. A task that measures itself here appears in the figures of
its iteration by itself. Left out: what the figures are (penstock/session/figures.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Span:
    """When a task ran, in seconds of `time.perf_counter`."""

    task: str
    began: float
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended - self.began


@dataclass(frozen=True)
class Lap:
    """An iteration by the clock: how long it took, and the tasks that ran in it."""

    seconds: float
    spans: Sequence[Span]


@dataclass
class LapClock:
    """The clock of one training.

    Attributes:
        began: when this lap began, moved by what was left out of it.
        spans: of this lap so far; several threads may add to it.
    """

    began: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def timed(self, task: str) -> Iterator[Span]:
        """Note when the block ran, as a span of the task.

        Where a part of the task ran before the block, the block sets `began` of the span to the earlier time.
        """
        span = Span(task, time.perf_counter())
        yield span
        span.ended = time.perf_counter()
        self.spans.append(span)

    def lap(self) -> Lap:
        """End this lap and begin the next."""
        now, spans = time.perf_counter(), self.spans
        lap = Lap(now - self.began, spans)
        self.began, self.spans = now, []
        return lap

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the block, and the tasks in it, out of the lap."""
        begin, spans = time.perf_counter(), self.spans
        self.spans = []
        yield
        self.began += time.perf_counter() - begin
        self.spans = spans
