"""An elastic group of a pool: its machine comes, is cut off, comes back and is taken away while a training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder, read_metrics
from tests.hosts.conftest import POOL, Cluster
from tests.waiting import came_true

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

GROUPS = {
    "learning": {"ranks": 1, "roles": ["actor"]},
    "staying": {"ranks": 1, "roles": ["rollout"]},
    "spare": {"pool": POOL, "hosts": 1, "ranks": 1, "roles": ["rollout"], "elastic": True},
}


def test_a_machine_of_a_pool_comes_and_goes_while_a_training_runs(cluster: Cluster) -> None:
    """Nobody waits for it, nor recovers from its loss; once its run is cancelled in Prefect it stays away.

    A machine without a processor to spare may be given up once more than the test asks for. Controls: the slot that it
    takes of the pool's limit; which run is whose; iterations go on after each change.
    """
    folder = RunFolder(cluster.home / "runs" / "elastic")
    run = cluster.start(cluster.config("elastic", groups=GROUPS, iterations=5000), "elastic")

    def told(what: str) -> list[dict[str, Any]]:
        return [event for event in read_events(folder) if event["event"] == what]

    def happened(condition: Callable[[], Any]) -> None:
        cluster.until(condition, 240)
        done = len(read_metrics(folder))
        cluster.until(lambda: len(read_metrics(folder)) > done + 2, 60)

    def sent_away() -> bool:
        for host in cluster.hosts_of(run):
            if host["state"]["type"] == "RUNNING":
                cluster.set_state(host["id"], "CANCELLING")
        return any(event["for_good"] for event in told("group left"))

    happened(lambda: told("group joined"))
    assert cluster.slots_taken() == 1
    (there,) = [machine for machine in cluster.machines if machine.processes("penstock.engines.groups.rank")]
    there.cut_off()
    try:
        happened(lambda: told("group left"))
    finally:
        there.connect()
    happened(lambda: len(told("group joined")) > len(told("group left")))
    happened(sent_away)
    events = [event["event"] for event in read_events(folder)]
    assert events == ["group joined", "group left"] * (len(events) // 2)
    first, *_, last = told("group left")
    assert not first["for_good"] and ("did not answer" in first["reason"] or "lost" in first["reason"])
    assert "was cancelled in Prefect" in last["reason"]
    assert came_true(lambda: cluster.slots_taken() == 0, 60)
    engines = [record["metrics"]["rollout/engines"] for record in read_metrics(folder) if record["iteration"]]
    assert {1.0, 2.0} == set(engines) and engines[-1] == 1.0
    asked = len(cluster.hosts_of(run))

    cluster.set_state(run, "CANCELLING")
    assert cluster.ends(run, 60) == "Cancelled"
    cluster.hosts_end(run)
    assert len(cluster.hosts_of(run)) == asked, "it was not asked for again"
