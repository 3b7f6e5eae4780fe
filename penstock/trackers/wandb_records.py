"""What Weights & Biases holds of a run: its own records, in the files that it keeps on this machine, or on its server.

Offline there is nobody to ask but the files. W&B writes them in blocks of 32 KiB, so that of a process that was killed
the last ones are missing: what counts is what they hold, and the rest is delivered once more. The format is LevelDB's
log of protobuf messages; the library writes it in Go and has no reader in Python.

Left out: writing (penstock/trackers/wandb.py).
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from penstock.trackers.tracker import Status

STEP = "step"
"""The figure by whose value W&B draws the others: rows of its own have numbers that only ever grow."""

EXIT_CODES: dict[Status, int] = {"completed": 0, "failed": 1, "cancelled": 255}  # W&B's own for Ctrl-C
SETTLING_S = 20.0

_BLOCK, _IDENTITY, _HEADER = 32768, 7, struct.Struct("<IHB")  # checksum, length, kind of a part
_LAST_PARTS = (1, 4)  # a record that is whole in a block; the last part of one that is not
_ON_SERVER: dict[str, Status] = {
    "finished": "completed",
    "failed": "failed",
    "crashed": "failed",
    "killed": "cancelled",
}


@dataclass
class Held:
    """What a run holds.

    Attributes:
        name: of the run, for people.
        steps: where it has a figure, by its name.
        config: its settings.
        status: how it ended; None: it is running, or was killed.
        rows: the number of the next row.
    """

    name: str = ""
    steps: dict[str, set[int]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    status: Status | None = None
    rows: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of figures, all at its step."""
        for figure in row.keys() - {STEP} if STEP in row else ():
            self.steps.setdefault(figure, set()).add(int(row[STEP]))
        self.rows = max(self.rows, int(row.get("_step", self.rows)) + 1)


def held_in_files(paths: Sequence[Path]) -> Held:
    """Return what the files of a run hold, one for each attempt, the oldest first.

    Raises:
        TimeoutError: a process of W&B still writes one.
    """
    _await_settled(paths)
    held = Held()
    for path in paths:
        held.status = None
        for record in _records(path.read_bytes()):
            _take(held, record)
    return held


def held_on_server(run: Any) -> Held:
    """Return what W&B's server holds of a run of `wandb.Api`."""
    held = Held(run.name, config=dict(run.config), status=_ON_SERVER.get(run.state))
    for row in run.scan_history():
        held.add({figure: value for figure, value in row.items() if value is not None})
    return held


def _take(held: Held, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        held.name = record.run.display_name
        held.config |= _values(record.run.config.update)
    elif kind == "config":
        held.config |= _values(record.config.update)
    elif kind == "history":
        held.add(_values(record.history.item))
    elif kind == "exit":
        code = record.exit.exit_code
        held.status = next((status for status, theirs in EXIT_CODES.items() if theirs == code), "failed")


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[Any]:
    """Return the records of a file (`wandb_internal.Record`) in order, up to where it was cut off."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    at, parts = _IDENTITY, b""
    while True:
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK  # what is left of a block has no room for a part
        if at + _HEADER.size > len(content):
            return
        _, length, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        if not kind or at + length > len(content):
            return
        parts, at = parts + content[at : at + length], at + length
        if kind in _LAST_PARTS:
            yield Record.FromString(parts)
            parts = b""


def _await_settled(paths: Sequence[Path]) -> None:
    """Wait until no process of W&B writes these files: it outlives a training that was killed by about a second."""
    deadline = time.monotonic() + SETTLING_S
    while written := {str(path.resolve()) for path in paths} & set(_written_by_wandb()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a process of W&B still writes {min(written)}")
        time.sleep(0.1)


def _written_by_wandb() -> Iterator[str]:
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "wandb-core":
            try:
                yield from (file.path for file in process.open_files())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has ended, or is another user's
