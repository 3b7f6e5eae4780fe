"""The machines of an elastic group: asked for when there are slots, given back when the group is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.configs.sections.run import HostsConfig
from penstock.engines.groups.hosts import HostFailed
from penstock.engines.groups.spec import GroupSpec, RankDevice
from penstock.session.machines import hosts as module
from penstock.session.machines.hosts import Dismissed, Machines, Stopped
from penstock.session.machines.pools import Missing
from penstock.state.run_folder import RunFolder


class Hosts:
    """Hosts of which each joins after a few looks, or never."""

    address = None

    def __init__(self) -> None:
        self.looks, self.awaited, self.looks_until_joined = 0, list[str](), 3
        self.look = lambda: None

    def await_again(self, name: str) -> None:
        self.awaited.append(name)

    def lost(self, name: str) -> str | None:
        return None

    def wait_joined(self, timeout_s: float, of: Sequence[str]) -> bool:
        self.looks += 1
        self.look()
        return self.looks > self.looks_until_joined

    def missing(self, of: Sequence[str]) -> list[str]:
        return list(of)

    def facts(self) -> dict[str, Any]:
        return {"h200/0": "facts"}


class Pool:
    """What Prefect is asked and says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held, self.asked, self.let_go = list[str](), list[str](), list[str]()
        self.cancelled, self.why = list[str](), dict[str, Missing]()
        patch.setattr(module, "held_once_free", self._slots)
        patch.setattr(module, "ask_for_hosts", self._ask)
        patch.setattr(module, "let_go", lambda asked, within_s: self.let_go.extend(run.name for run in asked))
        patch.setattr(module, "cancelled", lambda asked: self.cancelled)
        patch.setattr(module, "why_missing", lambda asked, names: self.why)
        patch.setattr(module, "check_one_folder", lambda *_: None)
        patch.setattr(module, "check_alike", lambda *_: None)

    @contextmanager
    def _slots(self, limit: str, needed: int, stop: threading.Event) -> Iterator[bool]:
        self.held.append(limit)
        yield not stop.is_set()
        self.held.remove(limit)

    def _ask(self, pool: str, names: Sequence[str], *_: Any) -> list[Any]:
        self.asked += names
        return [SimpleNamespace(name=name) for name in names]


def spec(*hosts: str) -> GroupSpec:
    """An elastic group with a GPU on each of some hosts."""
    devices = tuple(RankDevice(0, host) for host in hosts)
    return GroupSpec("spare", ("rollout",), devices, Path(), 1.0, 1.0, 1.0, elastic=True)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool whose hosts join at the third look."""
    return Pool(monkeypatch)


@pytest.fixture
def machines(tmp_path: Path) -> Any:
    """The machines of a training, with hosts that are not real."""
    hosts: Any = Hosts()
    return Machines(hosts, run=RunFolder(tmp_path), network=HostsConfig())


def test_a_lost_group_gives_its_machines_back_and_the_end_of_a_training_lets_them_complete(
    pool: Pool, machines: Any
) -> None:
    """They end with all other hosts then. Controls: slots are held meanwhile, and what the hosts have is known."""
    stop = threading.Event()
    with machines.lent(spec("h200/0", "h200/1"), stop):
        assert (pool.held, pool.asked) == (["gpus-h200"], ["h200/0", "h200/1"])
        assert machines.hosts.awaited == ["h200/0", "h200/1"]
        assert machines.elsewhere.hosts == {"h200/0": "facts"}
    assert (pool.held, pool.let_go, machines.asked) == ([], ["h200/0", "h200/1"], [])
    with machines.lent(spec("h200/0"), stop):
        stop.set()
    assert pool.let_go == ["h200/0", "h200/1"]
    assert [run.name for run in machines.asked] == ["h200/0"]


def test_hosts_that_join_by_themselves_are_not_asked_for(pool: Pool, machines: Any) -> None:
    """One that is there is not sent away. Control: nor is a group of this machine, which waits for nothing."""
    with machines.lent(spec("hosts/0"), threading.Event()):
        assert (pool.asked, machines.hosts.awaited, machines.hosts.looks) == ([], [], 4)
    with machines.lent(spec("local"), threading.Event()):
        assert machines.hosts.looks == 4


def test_the_wait_ends_with_the_training_a_cancelling_or_the_end_of_a_run(pool: Pool, machines: Any) -> None:
    """What was asked for is let go. Control: before, the machine was waited for."""
    stop = threading.Event()
    machines.hosts.looks_until_joined = 10**6
    machines.hosts.look = lambda: stop.set() if machines.hosts.looks == 3 else None
    with pytest.raises(Stopped), machines.lent(spec("h200/0"), stop):
        pass
    with pytest.raises(Stopped), machines.lent(spec("h200/0"), stop):
        pass  # no slot was free
    assert pool.asked == ["h200/0"]
    pool.why = {"h200/0": Missing("its run is Crashed", ended=True)}
    with pytest.raises(HostFailed, match="Crashed"), machines.lent(spec("h200/0"), threading.Event()):
        pass
    pool.cancelled = ["h200/0"]
    with pytest.raises(Dismissed, match="was cancelled"), machines.lent(spec("h200/0"), threading.Event()):
        pass
    assert pool.let_go == ["h200/0"] * 2


def test_a_cancelled_run_says_why_a_group_was_lost(pool: Pool, machines: Any) -> None:
    """Also where the loss was noticed first. Control: without one the loss is told as it is."""
    with pytest.raises(HostFailed), machines.lent(spec("h200/0"), threading.Event()):
        raise HostFailed("h200/0", "has hung up")
    with pytest.raises(Dismissed), machines.lent(spec("h200/0"), threading.Event()):
        pool.cancelled = ["h200/0"]
        raise HostFailed("h200/0", "has hung up")
