"""Slots: memory of a host for the trained state of its ranks. A rank writes there and may die; the host keeps it.

Each rank has two, so that one is whole while the other is being written. They are files without a name
(`memfd_create`): nothing is left of them when the host has ended, however it ended, and the size of /dev/shm does not
limit them. A rank opens one as a file descriptor of its host, in /proc. A rank of a later epoch finds what the one
before it wrote.

Imports no PyTorch. Left out: what a rank writes (penstock/engines/training/slot_writer.py), and when
(penstock/session/saving/snapshots.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import for_each_file
from penstock.engines.commands.hosts import SlotFacts, WrittenSlot
from penstock.state.state_image import image_name, read_header

SLOTS = 2  # of a rank
CHUNK = 1 << 24  # bytes read, hashed and written at once


class Slots:
    """The slots of all ranks of a host, by group and rank."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], list[Path]] = {}

    def open(self, group: str, rank: int) -> None:
        """Give a rank its slots; it keeps those that it has."""
        if (group, rank) not in self._files:
            names = [f"{group}-{rank}-{number}" for number in range(SLOTS)]
            self._files[group, rank] = [Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}") for name in names]

    def facts(self) -> list[SlotFacts]:
        """Return what is in every slot."""
        return [
            SlotFacts(group, rank, str(path), *_content(path))
            for (group, rank), paths in self._files.items()
            for path in paths
        ]

    def write(self, of: str, number: int, folder: Path) -> list[WrittenSlot]:
        """Copy every slot with that snapshot to a file in `folder`, side by side; nothing may write there meanwhile."""
        found = {Path(one.path): one for one in self.facts() if (one.of, one.number) == (of, number)}
        return for_each_file(
            list(found), lambda slot: _copy(slot, folder / image_name(found[slot].group, found[slot].rank))
        )


def _content(path: Path) -> tuple[str, int | None]:
    header = read_header(path)
    return ("", None) if header is None else (header.values["of"], header.values["number"])


def _copy(slot: Path, target: Path) -> WrittenSlot:
    """Copy a slot to a file that is on the disk then.

    Raises:
        UserError: the disk is full, or does not take it.
    """
    try:
        return _copied(slot, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}", "make room, or look at the disk") from error


def _copied(slot: Path, target: Path) -> WrittenSlot:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with target.open("wb", buffering=0) as file:
        for chunk in _chunks(slot):
            digest.update(chunk)
            size += file.write(chunk)
        os.fsync(file.fileno())
    return WrittenSlot(target.name, digest.hexdigest(), size)


def _chunks(slot: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(CHUNK))
    with slot.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            yield buffer[:count]
