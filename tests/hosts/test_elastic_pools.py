"""An elastic group of a pool: its machine comes, is cut off, comes back and is taken away while a training goes on."""

from __future__ import annotations

import pytest

from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder, read_metrics
from tests.hosts.conftest import POOL, Cluster
from tests.waiting import came_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS = {
    "learning": {"ranks": 1, "roles": ["actor"]},
    "staying": {"ranks": 1, "roles": ["rollout"]},
    "spare": {"pool": POOL, "hosts": 1, "ranks": 1, "roles": ["rollout"], "elastic": True},
}


def test_a_machine_of_a_pool_comes_and_goes_while_a_training_runs(cluster: Cluster) -> None:
    """Nobody waits for it, nor recovers from its loss; once its run is cancelled in Prefect it stays away.

    Controls: the slot that it takes of the pool's limit; which run is whose; iterations go on after each change.
    """
    folder = RunFolder(cluster.home / "runs" / "elastic")
    run = cluster.start(cluster.config("elastic", groups=GROUPS, iterations=5000), "elastic")

    def happened(count: int) -> None:
        cluster.until(lambda: len(read_events(folder)) == count, 240)
        done = len(read_metrics(folder))
        cluster.until(lambda: len(read_metrics(folder)) > done + 2, 60)

    happened(1)
    assert cluster.slots_taken() == 1
    (there,) = [machine for machine in cluster.machines if machine.processes("engines.groups.rank")]
    there.cut_off()
    try:
        happened(2)
    finally:
        there.connect()
    happened(3)
    first, second = cluster.hosts_of(run)
    (living,) = [host for host in (first, second) if host["state"]["type"] == "RUNNING"]
    cluster.set_state(living["id"], "CANCELLING")
    happened(4)
    events = read_events(folder)
    assert [event["event"] for event in events] == ["group joined", "group left"] * 2
    assert [event["for_good"] for event in events[1::2]] == [False, True]
    assert "did not answer" in events[1]["reason"] or "lost" in events[1]["reason"]
    assert "was cancelled in Prefect" in events[3]["reason"]
    assert came_true(lambda: cluster.slots_taken() == 0, 60)
    engines = [record["metrics"]["rollout/engines"] for record in read_metrics(folder) if record["iteration"]]
    assert {1.0, 2.0} == set(engines) and engines[-1] == 1.0

    cluster.set_state(run, "CANCELLING")
    assert cluster.ends(run, 60) == "Cancelled"
    cluster.hosts_end(run)
    assert len(cluster.hosts_of(run)) == 2, "it was not asked for again"
