"""A checkpoint that cannot be written is named, and neither holds the training up nor ends it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.engines.groups.hosts import HostFailed
from penstock.session.saving.checkpoints import CheckpointWriteFailed, CheckpointWriter, write_snapshot


class Log:
    """What was logged."""

    def __init__(self) -> None:
        self.said: list[Exception] = []

    def __call__(self, _: str, failure: Exception) -> None:
        self.said.append(failure)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("a file cannot be written: No space left on device", "make room"), "No space left"),
        (HostFailed("h200/1", "silent"), "host h200/1: silent"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_the_disk_or_a_host_does_is_said_and_the_next_checkpoint_is_tried(error: Exception, said: str) -> None:
    """Control: a defect is raised to whoever waits."""
    log, written = Log(), threading.Event()

    def fail() -> None:
        raise error

    with CheckpointWriter() as writer:
        writer.begin(("iteration", 7), fail, log)
        writer.begin(("iteration", 8), written.set, log)
        writer.wait()
    assert written.is_set()
    (failure,) = log.said
    assert isinstance(failure, CheckpointWriteFailed)
    assert "checkpoint of iteration 7 was not written" in str(failure)
    assert said in str(failure)
    with pytest.raises(ZeroDivisionError), CheckpointWriter() as writer:
        writer.begin(("iteration", 7), lambda: _defect(), log)
        writer.wait()


def _defect() -> Any:
    return 1 / 0


def test_the_snapshot_is_kept_while_it_is_written() -> None:
    """Whoever takes the next one asks. Control: afterwards it may be written over."""
    go_on = threading.Event()
    with CheckpointWriter() as writer:
        writer.begin(("step", 4), lambda: None if go_on.wait(60) else None, Log())
        assert writer.writing == ("step", 4)
        go_on.set()
        writer.wait()
        assert writer.writing is None


def test_a_snapshot_of_ranks_that_are_gone_is_given_up(tmp_path: Any) -> None:
    """Nobody waits for it. Control: while they live it is waited for, here until the deadline."""
    for hopeless, deadline_s in ((True, 60.0), (False, 0.1)):
        gone = threading.Event()
        if hopeless:
            gone.set()
        with pytest.raises(UserError, match="have not finished the snapshot"):
            write_snapshot([], "iteration", 3, tmp_path, gone, deadline_s)
