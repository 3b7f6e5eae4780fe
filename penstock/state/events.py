"""Events of a run: what was lost while it went on, how it went on, and numbers that went wrong; `events.jsonl`.

A line each. Nothing is decided by them: one that is damaged is left out. They only grow, also where a resume repeats
iterations: what was lost was lost. Left out: what makes an event (penstock/session/events.py), what is shown of them
(penstock/reports/losses.py and faults.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.state.digests import sealed, unsealed
from penstock.state.run_folder import RunFolder

RECOVERED, GIVEN_UP = "recovered", "given up"  # how a loss ends; its own event is named after the exception
FLOW_LOST = "FlowLost"
FAULT = "numerical fault"
JOINED, LEFT = "group joined", "group left"  # an elastic group, without which the training goes on
_NO_LOSS = (RECOVERED, GIVEN_UP, FAULT, JOINED, LEFT)


def append_event(run: RunFolder, event: Mapping[str, Any]) -> None:
    """Append an event and make it durable; a line that a crash cut before is closed."""
    with run.events.open("a+b") as stream:
        cut = stream.seek(0, os.SEEK_END) > 0 and _last_byte(run) != b"\n"
        stream.write((b"\n" if cut else b"") + sealed(event).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def append_flow_lost(run: RunFolder, why: str) -> None:
    """Append that the flow's process has ended, and the training goes on."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    append_event(run, {"event": FLOW_LOST, "number": next_number(run), "at": at, "reason": why})


def _last_byte(run: RunFolder) -> bytes:
    with run.events.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read()


def read_events(run: RunFolder) -> list[dict[str, Any]]:
    """Return the events of a run, the oldest first; none of a run that nothing happened to."""
    if not run.events.exists():
        return []
    found = (_event(line) for line in run.events.read_bytes().split(b"\n"))
    return [event for event in found if event]


def losses(run: RunFolder) -> list[dict[str, Any]]:
    """Return the events that are losses."""
    return [event for event in read_events(run) if is_loss(event)]


def is_loss(event: Mapping[str, Any]) -> bool:
    """Whether an event is a loss that the training recovers from, and nothing else."""
    return event["event"] not in _NO_LOSS


def next_number(run: RunFolder) -> int:
    """Return the number of the loss that comes next, by which its end names it."""
    return len(losses(run)) + 1


def open_loss(run: RunFolder) -> dict[str, Any] | None:
    """Return the last loss of a run, if nothing says how it ended."""
    last = [event for event in read_events(run) if event["event"] not in (FAULT, JOINED, LEFT)][-1:]
    return last[0] if last and is_loss(last[0]) else None


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return unsealed(line.decode())
    except (ValueError, RecursionError):
        return None
