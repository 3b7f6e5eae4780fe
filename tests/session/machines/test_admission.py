"""GPUs are admitted by slots of a server's limits: all that a training needs at once, and no more than it waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.spec import RankDevice
from penstock.session.machines import admission as module
from penstock.session.machines.admission import held, held_once_free, slots_needed, slots_on

GROUPS = {
    "learning": {"pool": "h200", "gpus": [0, 1], "roles": ["actor"]},
    "staying": {"pool": "h200", "gpus": [2], "roles": ["rollout"]},
    "spare": {"pool": "l40s", "hosts": 2, "gpus": [0], "roles": ["rollout"]},
}


def test_slots_of_an_elastic_group_of_a_pool_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its own when its machines are there. Control: a group that is not elastic is waited for."""
    monkeypatch.setattr(module, "gpus_of_pools", lambda config: {"h200": 8, "l40s": 8})
    assert slots_needed(TrainConfig(groups=GROUPS)) == {"gpus-h200": 3, "gpus-l40s": 2}
    elastic = {**GROUPS, "spare": {**GROUPS["spare"], "elastic": True}}
    assert slots_needed(TrainConfig(groups=elastic)) == {"gpus-h200": 3}
    assert slots_on([RankDevice(0, "l40s/0"), RankDevice(0, "l40s/1")]) == {"gpus-l40s": 2}


def test_slots_are_held_once_they_are_free_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends with the training. Controls: how often it was asked, and a server without such a limit."""
    tries: list[int] = []
    stop = threading.Event()

    @contextmanager
    def concurrency(limit: str, occupy: int, timeout_seconds: float, lease_duration: float) -> Iterator[None]:
        tries.append(occupy)
        if len(tries) == 2:
            yield
            return
        if len(tries) > 4:
            stop.set()
        raise TimeoutError

    monkeypatch.setattr(module, "concurrency", concurrency)
    limits: dict[str, Any] = {"gpus-l40s": 8}
    monkeypatch.setattr(module, "slots_of", limits.get)
    with held_once_free("gpus-l40s", 2, stop) as held:
        assert held and tries == [2, 2]
    with held_once_free("gpus-l40s", 2, stop) as held:
        assert not held and len(tries) == 5
    with held_once_free("gpus-none", 2, threading.Event()) as held:
        assert held and len(tries) == 5


def test_a_server_that_is_too_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an elastic group for as long as it is wanted, by a training a number of times. Control: the tries."""
    tries: list[int] = []
    busy = 3

    @contextmanager
    def concurrency(limit: str, occupy: int, **_: Any) -> Iterator[None]:
        tries.append(occupy)
        if len(tries) <= busy:
            raise ConcurrencySlotAcquisitionError("503 Service Unavailable")
        yield

    monkeypatch.setattr(module, "concurrency", concurrency)
    monkeypatch.setattr(module, "slots_of", {"gpus-l40s": 8}.get)
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    with held_once_free("gpus-l40s", 2, threading.Event()) as had:
        assert had and tries == [2] * 4
    tries.clear()
    with held("gpus-l40s", 2):
        assert tries == [2] * 4
    tries.clear()
    busy = module.BUSY_TRIES
    with pytest.raises(ConcurrencySlotAcquisitionError), held("gpus-l40s", 2):
        pass
    assert len(tries) == module.BUSY_TRIES
