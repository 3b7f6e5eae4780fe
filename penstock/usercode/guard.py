"""Calling user code in a worker process: a deadline, and a reason in one line.

Shared by reward functions (penstock/rewards/worker.py) and environments (penstock/environments/worker.py); evaluators
(penstock/evaluators/running.py) need `begin_worker` alone. Code in which no signal handler of Python runs outlives this
deadline; it is ended by killing its process from outside. Left out: that a process ends with its parent, and what it
started with it (penstock/usercode/kept.py).
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import SupportsFloat

from penstock.base.bounds import LARGEST_REWARD
from penstock.base.unicode import writable

_LONGEST_REASON = 300


class DeadlineExceeded(BaseException):
    """A call took too long. It is no `Exception`, so that a user's `except Exception` does not swallow it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Run the block under a deadline; the process's main thread only (signals).

    Raises:
        DeadlineExceeded: the block took longer.
    """
    # The handler is set for every call because the code may use SIGALRM itself, and the clock is read because it may
    # have cancelled our alarm or swallowed the exception.
    signal.signal(signal.SIGALRM, _expire)
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.monotonic() - started > seconds:
        raise DeadlineExceeded


@asynccontextmanager
async def within_loop(seconds: float) -> AsyncIterator[None]:
    """Run the block of a coroutine under a deadline, for what it awaits; code that blocks the loop outlives it.

    Raises:
        DeadlineExceeded: the block took longer.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except TimeoutError:  # ours, or one that the code raised by itself
        if deadline.expired():
            raise DeadlineExceeded from None
        raise


def _expire(*_: object) -> None:
    raise DeadlineExceeded


def reason_of(error: BaseException, ours: str) -> str:
    """One line: the exception, and the line of the user's code that it came through.

    Args:
        ours: the file that called the user's code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = max((k for k, frame in enumerate(frames) if frame.filename in (ours, __file__)), default=-1)
    theirs = frames[last + 1 :]
    where = f" ({Path(theirs[0].filename).name}:{theirs[0].lineno})" if theirs else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return writable(text[:_LONGEST_REASON] + where)


def finite_number(value: object, what: str) -> float:
    """Return a value as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is infinite or NaN, or beyond `LARGEST_REWARD`.
    """
    if value is None:
        raise TypeError(f"{what} is None: nothing was returned for it")
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    number = float(value)
    if problem := out_of_bounds(number):
        raise ValueError(f"{what} is {problem}")
    return number


def out_of_bounds(number: float) -> str:
    """Return what is wrong with a number as a reward, empty if nothing is."""
    if not math.isfinite(number):
        return str(number)
    return f"{number:g}, beyond +-{LARGEST_REWARD:g}" if abs(number) > LARGEST_REWARD else ""


def reward_and_parts(value: object) -> tuple[float, dict[str, float]]:
    """Return the reward that a value stands for, and its named parts: none for a number.

    If there is a part named `reward` it is the reward, else the sum of the parts is.

    Raises:
        TypeError: it is neither a number nor a dict of numbers.
        ValueError: a number is infinite or NaN or beyond `LARGEST_REWARD`, or the dict is empty.
    """
    if not isinstance(value, dict):
        return finite_number(value, "the reward"), {}
    if not value:
        raise ValueError("returned a dict without parts")
    parts = {writable(str(name)): finite_number(part, f"part '{name}'") for name, part in value.items()}
    return parts["reward"] if "reward" in parts else math.fsum(parts.values()), parts


def begin_worker() -> None:
    """Prepare a worker process, in its main thread."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would not run during a hang in C
    sys.stdout = sys.stderr  # what user code prints stays out of the command's output, and is not lost in a buffer
