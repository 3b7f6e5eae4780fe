"""Keys of hosts that a pool is asked for: they lie in a server's blocks, and none stays whatever fails on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import get_client

from penstock.configs.sections.run import HostsConfig
from penstock.engines.groups.channel import Address
from penstock.session.machines import pools
from penstock.session.machines.pools import HostRun, ask_for_hosts, let_go

ADDRESS = Address("tcp://127.0.0.1:1", "a", "b", "c")


def kept() -> list[str]:
    """Names of the blocks with keys that the server has."""
    with get_client(sync_client=True) as client:
        blocks = client.request("POST", "/block_documents/filter", json={}).json()
    return [block["name"] for block in blocks if block["name"].startswith("penstock-host-")]


def asked_for(monkeypatch: pytest.MonkeyPatch, taken: int) -> list[HostRun]:
    """Ask for two hosts a server that takes so many runs and is then away."""
    answers = iter([SimpleNamespace(id=uuid4())] * taken)

    def run_deployment(*_: Any, **__: Any) -> Any:
        if (found := next(answers, None)) is None:
            raise httpx.ReadTimeout("the server is busy")
        return found

    monkeypatch.setattr(pools, "run_deployment", run_deployment)
    asked: list[HostRun] = []
    try:
        asked += ask_for_hosts("machines", ["machines/0", "machines/1"], ADDRESS, HostsConfig(), "sums")
    except httpx.ReadTimeout:
        assert taken < 2
    return asked


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_server_that_is_away_while_hosts_are_asked_for_keeps_no_keys(
    taken: int, prefect_harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of hosts that it has taken stay until they are let go. Control: there are as many as were taken."""
    asked = asked_for(monkeypatch, taken)
    assert len(asked) == taken and sorted(kept()) == sorted(run.secret for run in asked)
    monkeypatch.setattr(pools, "_running", lambda _: [])
    let_go(asked, 0.0)
    assert kept() == []


def test_a_server_that_is_away_while_hosts_are_let_go_keeps_no_keys(
    prefect_harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_for(monkeypatch, 2)

    def away(_: Any) -> Any:
        raise httpx.ReadTimeout("the server is busy")

    monkeypatch.setattr(pools, "_running", away)
    with pytest.raises(httpx.ReadTimeout):
        let_go(asked, 0.0)
    assert kept() == []
