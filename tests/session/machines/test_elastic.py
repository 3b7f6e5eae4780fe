"""Elastic groups: brought again after a loss as often as that is allowed, and never where it would come again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.engines.groups.group import EngineError, RankLost
from penstock.engines.groups.hosts import HostFailed
from penstock.engines.groups.spec import GroupSpec, RankDevice
from penstock.session.machines import elastic as module
from penstock.session.machines.elastic import ElasticGroups, Gone, Joined
from penstock.session.machines.hosts import Dismissed
from tests.waiting import until

SPEC = GroupSpec("spare", ("rollout",), (RankDevice(None),), Path("logs"), 1.0, 1.0, 1.0, elastic=True)


class Group:
    """A group that lives until it is struck, closed or silent."""

    made: list[Group]

    def __init__(self, spec: GroupSpec, hosts: Any, epoch: int) -> None:
        self.spec, self.epoch, self.lost, self.heard = spec, epoch, False, True
        self.closed = threading.Event()
        Group.made.append(self)

    def wait_ready(self) -> None:
        pass

    def answers(self, within_s: float) -> bool:
        return self.heard

    def loss(self) -> RankLost | None:
        if self.lost:
            return RankLost("spare", 0, "exited with signal 9", Path("log"))
        if self.closed.is_set():
            raise RuntimeError("engine group 'spare' has ended")
        return None

    def close(self, grace_s: float) -> None:
        self.closed.set()


class Machines:
    """Machines of which each loan may fail."""

    hosts = None

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    @contextmanager
    def lent(self, spec: GroupSpec, stop: threading.Event) -> Iterator[None]:
        if self.failures:
            raise self.failures.pop(0)
        yield


Make = Callable[..., ElasticGroups]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make the elastic groups of a training whose model is there; they end with the test."""
    Group.made = []
    monkeypatch.setattr(module, "EngineGroup", Group)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    made: list[ElasticGroups] = []

    def groups(*failures: Exception, build: Callable[[Any], Any] = lambda _: None, restarts: int = 2) -> ElasticGroups:
        machines: Any = Machines(*failures)
        made.append(ElasticGroups([SPEC], machines, build, restarts, 3600.0).__enter__())
        made[-1].model_is_there()
        return made[-1]

    yield groups
    for one in made:
        one.__exit__(None, None, None)
        assert all(group.closed.is_set() for group in Group.made)


def joined(elastic: ElasticGroups) -> Any:
    """Wait until the group is ready, and let it be a member."""
    until(lambda: not elastic._ready.empty(), 10, "it is ready", 0.01)
    ready = elastic.ready()
    elastic.join(ready)
    assert elastic.members == ready
    return ready[0]


def news(elastic: ElasticGroups, count: int) -> list[Joined | Gone]:
    """Wait for some news."""
    found: list[Joined | Gone] = []
    until(lambda: found.extend(elastic.news()) or len(found) >= count, 10, f"{count} pieces of news", 0.01)
    return found


def test_a_lost_group_is_no_member_and_comes_back(make: Make) -> None:
    """As often as it may within an hour. Control: each has an epoch of its own, and the lost one is closed."""
    elastic = make(restarts=2)
    for epoch in (0, 1):
        member = joined(elastic)
        assert member.epoch == epoch
        member.lost = True
        assert news(elastic, 2) == [Joined("spare"), Gone("spare", "exited with signal 9", for_good=False)]
        assert elastic.members == [] and member.closed.is_set()
    joined(elastic).lost = True
    assert news(elastic, 2)[1] == Gone("spare", "exited with signal 9", for_good=True)
    assert len(Group.made) == 3


@pytest.mark.parametrize(
    ("failure", "stays_away"),
    [
        (HostFailed("pool/0", "its run is Crashed"), False),
        (RankLost("spare", 0, "exited with code 1", Path("log")), False),
        (Dismissed("the run of host pool/0 was cancelled in Prefect"), True),
        (UserError("hosts have different versions of vllm", "install the same"), True),
        (EngineError("spare", 0, "build", "ValueError: no", Path("log")), True),
    ],
)
def test_what_would_come_again_keeps_a_group_away(make: Make, failure: Exception, stays_away: bool) -> None:
    """A machine that fails does not: the control is the group that comes next."""
    elastic = make(failure)
    (gone,) = news(elastic, 1)
    assert isinstance(gone, Gone) and gone.for_good == stays_away
    if stays_away:
        assert not any(thread.is_alive() for thread in elastic._threads) or not Group.made
    else:
        joined(elastic)


def test_a_group_that_cannot_load_the_model_stays_away(make: Make) -> None:
    """A rank's own error would come again."""

    def fails(_: Any) -> None:
        raise EngineError("spare", 0, "build", "ValueError: no", Path("log"))

    (gone,) = news(make(build=fails), 1)
    assert isinstance(gone, Gone) and gone.for_good and "ValueError: no" in gone.reason


def test_a_member_that_is_silent_is_left_out_and_brought_again(make: Make) -> None:
    """All that take part in a reshard would wait for it. Control: one that answers stays."""
    elastic = make()
    member = joined(elastic)
    elastic.leave_out_silent()
    assert elastic.members == [member]
    member.heard = False
    elastic.leave_out_silent()
    assert elastic.members == []
    told = news(elastic, 2)
    assert told[1] == Gone("spare", "it did not answer within 2 s at a reshard", for_good=False)
    assert joined(elastic).epoch == 1


def test_groups_that_a_recovery_ends_come_back_without_counting_as_lost(make: Make) -> None:
    """Whatever `restarts` says. Control: the new one is another group."""
    elastic = make(restarts=0)
    for epoch in range(3):
        assert joined(elastic).epoch == epoch
        elastic.end_all()
        assert elastic.members == []
    joined(elastic)
    assert {type(one) for one in elastic.news()} == {Joined}
