"""Ranks in reserve take the places of those that are lost, in the environment of the new epoch."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from penstock.engines.groups.group import EngineGroup, RankLost
from penstock.engines.groups.hosts import Hosts
from penstock.engines.groups.processes import RESERVE
from tests.engines.groups.small_ranks import pids_of, spec
from tests.processes import alive, words_of
from tests.waiting import until

AHEAD = "tests.engines.groups.small_ranks"
NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def reserve_of(hosts: list[psutil.Process]) -> set[int]:
    """Return the processes in reserve below some processes that have imported what they are to import."""
    below = [child for host in hosts for child in host.children(recursive=True)]
    return {child.pid for child in below if words_of(child)[-2:] == ["penstock.engines.groups.rank", RESERVE]}


def ranks_of_next_epoch(folder: Path, hosts: Hosts, told: bool) -> tuple[set[int], EngineGroup]:
    """Lose a rank; return what was in reserve then, and the group of the next epoch."""
    first = EngineGroup(spec(folder), hosts)
    pids = pids_of(first)
    if told:
        first.keep_reserve(AHEAD)
        until(lambda: len(reserve_of([psutil.Process()])) == 2, 20, "both ranks have one in reserve")
        first.keep_reserve(AHEAD)
        first.call("echo", key="again")
    waiting = reserve_of([psutil.Process()])
    psutil.Process(pids[1]).kill()
    with pytest.raises(RankLost):
        first.call("ponder_for_ever", key="p")
    first.close()
    assert not any(map(alive, pids))
    return waiting, EngineGroup(spec(folder), hosts, epoch=1)


def test_those_in_reserve_are_the_next_ranks(tmp_path: Path) -> None:
    """One beside each rank, however often it is asked for; it knows its number, and where the new ranks meet.

    Control: without any the ranks are new processes.
    """
    with Hosts(tmp_path) as hosts:
        waiting, group = ranks_of_next_epoch(tmp_path, hosts, told=True)
        with group:
            assert len(waiting) == 2
            assert set(pids_of(group)) == waiting
            told = group.call("environment", key="e", names=NAMES)
            assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [
                ("0", "0", "2"),
                ("1", "1", "2"),
            ]
            assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    with Hosts(tmp_path) as hosts:
        waiting, group = ranks_of_next_epoch(tmp_path, hosts, told=False)
        with group:
            assert not waiting
            assert len(set(pids_of(group))) == 2


def test_they_meet_where_the_new_epoch_does(tmp_path: Path) -> None:
    """The old store may still hold what the old ranks put there: the port is another one, also in the environment."""
    with Hosts(tmp_path) as hosts:
        first = EngineGroup(spec(tmp_path), hosts)
        old = first.call("environment", key="e", names=NAMES)[0]["MASTER_PORT"]
        first.keep_reserve(AHEAD)
        until(lambda: len(reserve_of([psutil.Process()])) == 2, 20, "both ranks have one in reserve")
        first.close(0.0)
        with EngineGroup(spec(tmp_path), hosts, epoch=1) as group:
            new = [one["MASTER_PORT"] for one in group.call("environment", key="e", names=NAMES)]
            assert len(set(new)) == 1
            assert new[0] != old


def test_one_that_has_died_is_not_waited_for(tmp_path: Path) -> None:
    """A new process takes the place."""
    with Hosts(tmp_path) as hosts:
        first = EngineGroup(spec(tmp_path), hosts)
        first.wait_ready()
        first.keep_reserve(AHEAD)
        until(lambda: len(reserve_of([psutil.Process()])) == 2, 20, "both ranks have one in reserve")
        victim, other = sorted(reserve_of([psutil.Process()]))
        psutil.Process(victim).kill()
        until(lambda: not alive(victim), 10, "it is dead")
        first.close(0.0)
        with EngineGroup(spec(tmp_path), hosts, epoch=1) as group:
            pids = set(pids_of(group))
            assert other in pids
            assert victim not in pids


def test_nothing_in_reserve_outlives_its_host(tmp_path: Path) -> None:
    """It ends with the host, as ranks do."""
    with Hosts(tmp_path) as hosts:
        with EngineGroup(spec(tmp_path), hosts) as group:
            group.wait_ready()
            group.keep_reserve(AHEAD)
            until(lambda: len(reserve_of([psutil.Process()])) == 2, 20, "both ranks have one in reserve")
            waiting = reserve_of([psutil.Process()])
        assert all(map(alive, waiting))
    until(lambda: not any(map(alive, waiting)), 10, "they are gone")
