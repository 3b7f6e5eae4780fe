"""Groups work at the same time, and none is left waiting for another that has failed."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from penstock.engines.groups.group import EngineError, EngineGroup, GroupClosed, RankLost
from penstock.engines.groups.side_by_side import side_by_side


class Group:
    """A group whose command waits for the other's, then fails or hangs until it is closed."""

    def __init__(self, meeting: Barrier, ends: str) -> None:
        self.meeting, self.ends, self.closed = meeting, ends, Event()

    def call(self, command: str, *, key: str, number: int) -> list[dict[str, Any]]:
        self.meeting.wait(10)
        if self.ends == "fails":
            raise LookupError("the first cause")
        if self.ends == "raises":
            raise EngineError("main", 0, command, "Connection closed by peer", Path("log"))
        if self.ends == "is lost":
            assert not self.closed.wait(0.5)
            raise RankLost("rollout", 1, "exited with signal 9 (SIGKILL)", Path("log"))
        if self.ends == "is closed":
            raise GroupClosed("engine group 'spare' was closed during 'reshard'")
        if self.ends == "hangs":
            assert self.closed.wait(10)
            raise RuntimeError("closed meanwhile")
        return [{"said": f"{command} {key} {number}"}]

    def close(self, grace_s: float) -> None:
        self.closed.set()


def _run(*ends: str, **options: Any) -> tuple[list[Group], Any]:
    meeting = Barrier(len(ends))
    groups = [Group(meeting, way) for way in ends]
    arguments: Any = {group: {"number": number} for number, group in enumerate(groups)}
    return groups, lambda: side_by_side("reshard", "3", arguments, **options)


def test_all_groups_work_at_once_on_arguments_of_their_own() -> None:
    """One after the other they would wait for each other forever. None is closed."""
    groups, run = _run("well", "well")
    replies: dict[EngineGroup, Any] = run()
    assert [replies[group] for group in groups] == [[{"said": f"reshard 3 {number}"}] for number in (0, 1)]  # type: ignore[index]
    assert not any(group.closed.is_set() for group in groups)


@pytest.mark.parametrize("ends", ["is lost", "is closed"])
def test_a_loss_that_the_others_outlive_is_told_at_once_and_ends_nobody(ends: str) -> None:
    """Also where another thread saw it first, and closed the group. It has no replies.

    Controls: an error of a rank is none, and one that is not outlived ends the others.
    """
    told: list[Any] = []
    groups, run = _run(ends, "well", outlived=lambda group: told.append(group) or True)
    assert list(run()) == [groups[1]]
    assert told == [groups[0]] and not groups[1].closed.is_set()
    groups, run = _run("raises", "hangs", outlived=lambda group: True)
    with pytest.raises(EngineError):
        run()
    assert groups[1].closed.is_set()
    _, run = _run(ends, "well", outlived=lambda group: False)
    with pytest.raises((RankLost, GroupClosed)):
        run()


@pytest.mark.parametrize("ends", [("fails", "hangs"), ("hangs", "fails")])
def test_a_failure_ends_the_others_and_is_what_is_told(ends: tuple[str, str]) -> None:
    """A rank in a collective with a dead partner would wait until its deadline."""
    groups, run = _run(*ends)
    with pytest.raises(LookupError, match="the first cause"):
        run()
    assert [group.closed.is_set() for group in groups] == [way == "hangs" for way in ends]


def test_a_loss_is_told_before_what_it_did_to_others() -> None:
    """A rank whose partner in a collective was killed raises first. Control: without a loss its exception is told."""
    with pytest.raises(RankLost, match="SIGKILL"):
        _run("raises", "is lost")[1]()
    with pytest.raises(EngineError, match="closed by peer"):
        _run("raises", "well")[1]()
