"""Ctrl-C and SIGTERM wait while a large library is imported.

Python raises what they mean wherever the main thread happens to be. In the seconds of such an import that is often a
finaliser or a callback, whose exceptions Python drops: the signal would be lost and the training go on. Not a task.
Left out: other threads, which Python never interrupts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
