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
    """An iteration by the clock: how long it took, and the tasks that ran in it, both without what was left out.

    A task may have begun before it: a rollout that was ahead.
    """

    began: float
    seconds: float
    spans: Sequence[Span]


@dataclass
class LapClock:
    """The clock of one training.

    Attributes:
        began: when this lap began.
        spans: of this lap so far; several threads may add to it.
        stops: from when to when the clock stood still in this lap.
    """

    began: float = 0.0
    spans: list[Span] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def timed(self, task: str) -> Iterator[Span]:
        """Note when the block ran, as a span of the task.

        Where a part of the task ran before the block, the block sets `began` of the span to the earlier time.
        """
        span = Span(task, time.perf_counter())
        yield span
        span.ended = time.perf_counter()
        self.spans.append(span)

    def ran(self, task: str, began: float, ended: float) -> None:
        """Note a span of a task that ran beside others."""
        self.spans.append(Span(task, began, ended))

    def lap(self) -> Lap:
        """End this lap and begin the next."""
        now = time.perf_counter()
        spans = [Span(span.task, self._shown(span.began), self._shown(span.ended)) for span in self.spans]
        lap = Lap(self._shown(self.began), self._shown(now) - self._shown(self.began), spans)
        self.began, self.spans, self.stops = now, [], []
        return lap

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the block, and the tasks in it, out of the lap; of a task that goes on meanwhile, this part."""
        begin, spans = time.perf_counter(), self.spans
        self.spans = []
        yield
        self.stops.append((begin, time.perf_counter()))
        self.spans = spans

    def _shown(self, at: float) -> float:
        """Return what this clock showed at a time of this lap."""
        return at - sum(min(at, end) - begin for begin, end in self.stops if begin < at)
