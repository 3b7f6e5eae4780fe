"""How long a rank's collectives take during an update, without a profiler and without waiting for any of them.

Every collective of DeepSpeed and of this code goes through `torch.distributed`, or through what DeepSpeed's backend
keeps of it. For the time of an update these functions are wrapped: a CUDA event before the call and one after it, on
the stream that communicates (DeepSpeed reduces on a stream of its own). That is a few microseconds per collective, so
it can be on in every step; a profiler would slow down what it measures, and DeepSpeed's own communication log waits
for each collective. On a CPU a clock takes the place of the events.

The result is the time in which at least one collective was under way: from when its input was ready to its end, or to
where DeepSpeed waits for it. It contains waits for slower ranks and transfers that run beside computation: it is the
time that overlap has to hide, not the time that is left after overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from deepspeed.comm import comm

FUNCTIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
BACKEND_FUNCTIONS = ("all_gather_function", "reduce_scatter_function", "all_gather_coalesced", "all_reduce_coalesced")


class CollectiveTimes:
    """Begin and end of every collective of a block, on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def seconds(self) -> float:
        """Return the seconds in which at least one collective was under way; waits for the device."""
        if not self._cuda or not self._spans:
            return covered(self._spans)
        torch.cuda.synchronize()
        origin = self._spans[0][0]
        return covered(tuple(origin.elapsed_time(mark) / 1e3 for mark in span) for span in self._spans)

    def wrap(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collective with its times taken; an asynchronous one ends where it is waited for."""

        @wraps(collective)
        def timed(*arguments: Any, **settings: Any) -> Any:
            begin = self._mark()
            work = collective(*arguments, **settings)
            if hasattr(work, "wait"):
                return _TimedWork(work, lambda: self._spans.append((begin, self._mark())))
            self._spans.append((begin, self._mark()))
            return work

        return timed

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _TimedWork:
    """A collective's handle that tells when it has been waited for."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self, *arguments: Any, **settings: Any) -> Any:
        result = self._work.wait(*arguments, **settings)
        self._ended()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def timed_collectives(device: torch.device) -> Iterator[CollectiveTimes]:
    """Take the times of every collective in this block; DeepSpeed must be initialised."""
    times = CollectiveTimes(device)
    with ExitStack() as stack:
        for owner, names in ((torch.distributed, FUNCTIONS), (comm.cdb, BACKEND_FUNCTIONS)):
            for name in names:
                stack.enter_context(_replaced(owner, name, times.wrap(getattr(owner, name))))
        yield times


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)  # a method is not in the instance until it is replaced there
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def covered(spans: Iterable[tuple[float, ...]]) -> float:
    """Return the length of the union of spans (begin, end), in their unit."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
