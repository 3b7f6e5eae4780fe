"""How much memory of the machine a command and all that it starts hold together, at most.

What processes share counts once: each has its part of it (the kernel's proportional set size). Left out: what is held
for less than the time between two looks, and processes that have lost their parent.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

LOOK_S = 5.0  # seconds between two looks; each takes some 70 ms of a core, which the command lacks


def run_measured(command: Sequence[str]) -> tuple[int, float]:
    """Run a command to its end; return its exit code, and the most GiB that were seen."""
    most = 0
    with subprocess.Popen(command) as running:
        while True:
            try:
                return running.wait(timeout=LOOK_S), most / 2**30
            except subprocess.TimeoutExpired:
                most = max(most, held_bytes(running.pid))


def held_bytes(pid: int) -> int:
    """Return the bytes that a process and its descendants hold now; 0 for one that has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_share_of(member.pid) for member in family)


def _share_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
