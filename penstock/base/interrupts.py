"""Ctrl-C and SIGTERM wait while a large library is imported; Ctrl-C ends a command that has not begun anything yet.

Python raises what they mean wherever the main thread happens to be. In the seconds of such an import that is often a
finaliser or a callback, whose exceptions Python drops: the signal would be lost and the training go on. Not a task.
Left out: other threads, which Python never interrupts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 128 + signal.SIGINT  # the exit code of a command that Ctrl-C has ended, as shells have it


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold signals back during the block; those that came take effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process with a word during the block, in which nothing is begun that would have to end."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's background job ignores it
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(*_: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(STOPPED)
