"""Processes that run users' code, each below a keeper of its own, which lets nothing outlive it (keeper.py).

`Kept` is the `multiprocessing` context of worker processes: their numbers, signals and exit codes are the workers' own,
and Pebble sees no difference. `start` is what it and the ranks of an engine group are started by.

Spawned, never forked: the caller has threads and perhaps CUDA. Left out: what the processes do.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Any

from penstock.usercode.keeper import BETWEEN

_KEEPER = str(Path(__file__).with_name("keeper.py"))


def command_of(command: Sequence[str | bytes], descriptors: Sequence[int], session: bool = False) -> list[str]:
    """Return the command that runs `command` below a keeper, which ends with this process.

    Args:
        descriptors: the first gets the number of the process that `command` becomes; the keeper lets go of all.
        session: whether that process begins a session.
    """
    words = BETWEEN.join(os.fsdecode(word) for word in command)
    order = [*(["session"] if session else []), ",".join(map(str, descriptors)), words]
    return [sys.executable, "-I", "-S", _KEEPER, str(os.getpid()), *order]


@contextmanager
def unread() -> Iterator[int]:
    """Give a descriptor to which a keeper may write the number of the process, for a caller that does not need it."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def number_from(descriptor: int) -> int:
    """Return the number of a process that a keeper has started, and close the descriptor.

    Raises:
        ChildProcessError: it has started none.
    """
    with open(descriptor, "rb") as stream:
        if not (number := stream.read()):
            raise ChildProcessError("the keeper of a process ended before it had started it")
        return int(number)


def is_being_spawned() -> bool:
    """Whether this process is one that imports the program which has started it, before it does anything else."""
    return getattr(current_process(), "_inheriting", False)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Popen(popen_spawn_posix.Popen):
    """A worker started below a keeper: `_launch` is the base's with the keeper between, `pid` is the worker's."""

    def _launch(self, process_obj: BaseProcess) -> None:
        tracker, content = resource_tracker.getfd(), io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), content)
            reduction.dump(process_obj, content)
        finally:
            context.set_spawning_popen(None)
        (ended, theirs), (given, mine), (number, told) = os.pipe(), os.pipe(), os.pipe()
        self.sentinel, self.finalizer = ended, util.Finalize(self, _close, (ended, mine))
        line = spawn.get_command_line(tracker_fd=tracker, pipe_handle=given)
        passed = [told, given, theirs, tracker, *self._fds]  # type: ignore[attr-defined]
        try:
            self._keeper = util.spawnv_passfds(sys.executable.encode(), command_of(line, passed), passed)
        finally:
            _close(given, theirs, told)
        self.pid = number_from(number)
        with open(mine, "wb", closefd=False) as stream:
            stream.write(content.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the worker's exit code, which its keeper repeats; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self._keeper, flag)
            except ChildProcessError:
                return None
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class Kept(context.SpawnContext):
    """`multiprocessing.get_context("spawn")`, with a keeper above each process."""

    Process = _Process
