"""Whether other processes are still there."""

from __future__ import annotations

import psutil


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of that id, runs; a zombie does not: nobody has collected it yet, that is all."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
