"""Blows to a training that runs in this process: a signal to a rank or a host, at a moment that a test names.

A moment is a command, which the process that is hit has got and does not carry out; or a function of the flow as it is
called. Moments that only chance finds are not here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pytest

from penstock.engines.groups.group import Call, EngineGroup
from penstock.session.saving.checkpoints import CheckpointWriter
from tests.processes import alive, environment_of, words_of

HOST = "host"


@dataclass
class Blow:
    """A signal to a process of the training.

    Attributes:
        at: name of the command with whose sending it falls, or path of the function before whose call it does.
        key: what the command's key begins with, e.g. "3/" for iteration 3; of a function, how often it was called.
        to: the group whose rank is hit, or the host of this machine.
        rank: its number.
        number: the signal.
        times: how often it falls.
        written: whether the checkpoint that is being written is whole before it falls.
        fallen: how often it fell.
    """

    at: str
    key: str = ""
    to: str = "main"
    rank: int = 0
    number: signal.Signals = signal.SIGKILL
    times: int = 1
    written: bool = False
    fallen: int = field(default=0, init=False)

    def aimed(self) -> Callable[[], None]:
        """Let the process stand still, unless it was hit as often as it is to be; return what sends the signal."""
        if self.fallen == self.times:
            return lambda: None
        self.fallen += 1
        process = target(self.to, self.rank)
        process.suspend()
        return partial(os.kill, process.pid, self.number)


def target(to: str, rank: int) -> psutil.Process:
    """Return the process of a rank, or of this machine's host, below this one."""
    below = psutil.Process().children(recursive=True)
    module = "penstock.engines.groups.host" if to == HOST else "penstock.engines.groups.rank"
    found = [process for process in below if _runs(process, module)]
    if to != HOST:
        wanted = {"PENSTOCK_GROUP": to, "RANK": str(rank)}
        found = [process for process in found if wanted.items() <= environment_of(process).items()]
    (process,) = found
    return process


def _runs(process: psutil.Process, module: str) -> bool:
    return alive(process) and words_of(process)[-1:] == [module]


@contextmanager
def blows_falling(blows: Sequence[Blow]) -> Iterator[None]:
    """Let blows fall at their moments while the context lasts; each has to."""
    begin, write, writers = EngineGroup.begin, CheckpointWriter.begin, list[CheckpointWriter]()

    def written(writer: CheckpointWriter, *arguments: Any) -> None:
        writers.append(writer)
        write(writer, *arguments)

    def struck(group: EngineGroup, command: str, *, key: str, **options: Any) -> Call:
        meant = [
            blow
            for blow in blows
            if blow.at == command and key.startswith(blow.key) and blow.to in (HOST, group.spec.name)
        ]
        if any(blow.written for blow in meant):
            for writer in writers:
                writer.wait()
        falling = [blow.aimed() for blow in meant]
        call = begin(group, command, key=key, **options)
        for fall in falling:
            fall()
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineGroup, "begin", struck)
        patch.setattr(CheckpointWriter, "begin", written)
        for blow in blows:
            if "." in blow.at:
                _strike_before(patch, blow)
        yield
    assert [blow.fallen for blow in blows] == [blow.times for blow in blows]


def _strike_before(patch: pytest.MonkeyPatch, blow: Blow) -> None:
    module, _, name = blow.at.rpartition(".")
    function: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)
    calls = 0

    def struck(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= int(blow.key):
            blow.aimed()()
        return function(*arguments, **named)

    patch.setattr(blow.at, struck)
