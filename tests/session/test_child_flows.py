"""Where Prefect's server refuses because two writes met, a child flow is asked for again at once; an absent server is
waited for.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import httpx
import pytest
from prefect.client import base
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY

from penstock.session.prefect import patient_clients, quick_child_flows


def waits(refusals: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how long Prefect's own client would wait before each new attempt, against so many refusals."""
    slept: list[float] = []
    answers = iter([503] * refusals)
    monkeypatch.setattr(base.time, "sleep", slept.append)
    transport = httpx.MockTransport(lambda request: httpx.Response(next(answers, 200), request=request))
    settings: dict[str, Any] = {"base_url": "http://server", "transport": transport}
    with base.PrefectHttpxSyncClient(**settings, enable_csrf_support=False) as client:
        assert client.post("/flow_runs/").status_code == 200
    return slept


@pytest.mark.parametrize("quick", [True, False])
def test_the_first_wait_is_short_and_the_patience_as_long(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server that is down for a minute the waits add up to as much. Control: Prefect's client by itself."""
    with quick_child_flows() if quick else nullcontext():
        (first,) = waits(1, monkeypatch)
        assert (first < 0.2) is quick
        assert sum(waits(PREFECT_CLIENT_MAX_RETRIES.value(), monkeypatch)) > 30


def test_everything_is_as_before_afterwards() -> None:
    """Also where the training fails."""
    before = (base.clamped_poisson_interval, PREFECT_CLIENT_MAX_RETRIES.value())
    with pytest.raises(RuntimeError), quick_child_flows():
        assert PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value() is None
        raise RuntimeError
    assert (base.clamped_poisson_interval, PREFECT_CLIENT_MAX_RETRIES.value()) == before


@pytest.mark.parametrize("patient", [True, False])
def test_a_new_client_waits_for_a_server_that_is_away(patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect makes one for each child flow. Control: by itself it gives up at once."""
    slept: list[float] = []
    monkeypatch.setattr(base.time, "sleep", slept.append)
    away = iter([True] * 3)

    def answer(request: httpx.Request) -> httpx.Response:
        if next(away, False):
            raise httpx.ConnectError("nobody listens", request=request)
        return httpx.Response(200, request=request)

    settings: dict[str, Any] = {"base_url": "http://server", "transport": httpx.MockTransport(answer)}
    with ExitStack() as stack:
        with patient_clients() if patient else nullcontext():
            client = stack.enter_context(base.PrefectHttpxSyncClient(**settings, enable_csrf_support=False))
            if not patient:
                with pytest.raises(httpx.ConnectError):
                    client.post("/flow_runs/")
                return
            assert client.post("/flow_runs/").status_code == 200
        assert len(slept) == 3
        assert client._has_connected is True, "afterwards it goes by what it has seen itself"
        assert base.PrefectHttpxSyncClient(**settings)._has_connected is False
