"""Checkpoints written behind the training's back: hosts copy a snapshot to files, then its manifest names it.

A thread of the flow waits for the copies, of one checkpoint at a time; the training has gone on meanwhile. What cannot
be written (a full disk, a host that is lost) is said by its name and leaves the checkpoint before it in force: the
training goes on, and the next one is tried like this one.

Left out: what else belongs to a checkpoint, and what the manifest says (penstock/tasks/).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import WriteSlots, WrittenSlot
from penstock.engines.groups.group import EngineGroup
from penstock.engines.groups.hosts import HostFailed
from penstock.session.saving.snapshots import Named, Of, newest_whole, slots_of
from penstock.state.state_image import IMAGES

LOOK_S = 0.05  # between two looks whether a snapshot is whole


class CheckpointWriteFailed(UserError):
    """A checkpoint could not be written; the one before it is in force."""


@dataclass(frozen=True)
class WrittenState:
    """Files of a checkpoint that the disk has: SHA-256 by name, bytes of all, and how long it took, in seconds."""

    hashes: dict[str, str]
    size: int
    seconds: float


class CheckpointWriter:
    """A thread that writes checkpoints, one at a time; as a context it leaves none unfinished.

    Attributes:
        writing: what the snapshot is called that is being copied to files; None: none is.
    """

    def __init__(self) -> None:
        self.writing: Named | None = None
        self.hopeless = threading.Event()  # a snapshot that is not whole by now will never be: its ranks are gone
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.settle()
        self._thread.shutdown(wait=False)  # who cancels a training waits for no disk

    def begin(self, snapshot: Named, write: Callable[[], None], log: Callable[[str, Exception], None]) -> None:
        """Write a checkpoint in the thread, once the one before it is done.

        Args:
            snapshot: that it is made of.
            log: takes a message with a place for the failure, and the failure.
        """
        self.wait()
        self.writing = snapshot
        self._begun = self._thread.submit(self._write, write, log)

    def wait(self) -> None:
        """Wait until what was begun is named in the manifest, or has failed.

        Raises:
            Exception: a defect; what the disk or a host does is said in the log.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def settle(self) -> None:
        """Wait likewise once the ranks are gone: a snapshot that they have not finished is given up."""
        self.hopeless.set()
        self.wait()
        self.hopeless.clear()

    def _write(self, write: Callable[[], None], log: Callable[[str, Exception], None]) -> None:
        assert self.writing is not None
        try:
            write()
        except (UserError, HostFailed, OSError) as error:
            of, number = self.writing
            failed = CheckpointWriteFailed(
                f"the checkpoint of {of} {number} was not written: {_reason(error)}",
                "the checkpoint before it is in force; where a disk is full, make room",
            )
            log("%s", failed)
        finally:
            self.writing = None


def write_snapshot(
    groups: Sequence[EngineGroup], of: Of, number: int, folder: Path, hopeless: threading.Event, deadline_s: float
) -> WrittenState:
    """Have hosts copy a snapshot to files in `folder`, once every rank has finished it.

    Args:
        hopeless: set where the ranks are gone.
        deadline_s: for all of it.

    Raises:
        HostFailed: a host is lost.
        UserError: the snapshot is not finished, or a file cannot be written.
    """
    began = time.monotonic()
    while newest_whole(slots_of(groups), of, number) != number:
        if hopeless.is_set() or time.monotonic() - began > deadline_s:
            raise UserError("its ranks have not finished the snapshot", "see their logs")
        time.sleep(LOOK_S)
    begun = [
        groups[0].hosts.begin(host, WriteSlots(of, number, str(folder)))
        for host in dict.fromkeys(host for group in groups for host in group.spec.hosts)
    ]
    files: list[WrittenSlot] = [file for reply in begun for file in reply.result(deadline_s)]
    hashes = {file.name: file.sha256 for file in files}
    return WrittenState(hashes, sum(file.size for file in files), time.monotonic() - began)


def _reason(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else str(error)


def written_by_ranks(folder: Path) -> WrittenState:
    """Return what the ranks themselves have written to `folder`, which is still to be hashed."""
    return WrittenState({}, sum(path.stat().st_size for path in folder.glob(IMAGES)), 0.0)
