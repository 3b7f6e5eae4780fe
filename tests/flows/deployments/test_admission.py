"""GPUs of pools: slots are held whole and given back, and nobody without need or without a limit waits."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.session.machines import admission as module
from penstock.session.machines.admission import admission, limit_of
from tests.waiting import until

LIMIT = limit_of("h200")

pytestmark = pytest.mark.usefixtures("prefect_harness")


@pytest.fixture
def two_slots(prefect_harness: None) -> Iterator[None]:
    """A limit of two GPU slots on the server, for one test."""
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=LIMIT, limit=2))
        yield
        client.delete_global_concurrency_limit_by_name(LIMIT)


@pytest.fixture(autouse=True)
def _pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a pool whose machines have four GPUs; nothing here touches one."""
    monkeypatch.setattr(module, "gpus_of_pools", lambda config: {"h200": 4})


def admitted(gpus: int) -> AbstractContextManager[Any]:
    """Return the admission of a training on so many GPUs of a machine of the pool; 0: on the CPU of this one."""
    group = {"pool": "h200", "gpus": list(range(gpus)), "roles": ["actor", "rollout"]}
    return admission(TrainConfig(groups={"main": group} if gpus else {}), "a-training")


def limit() -> Any:
    """Return the limit as the server has it."""
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(LIMIT)


def test_a_training_holds_a_slot_per_gpu_and_gives_them_back(two_slots: None) -> None:
    """All slots at once, also given back when the training fails; a training on CPU ranks takes none."""
    with admitted(2):
        assert limit().active_slots == 2
        with admitted(0):
            assert limit().active_slots == 2
    assert limit().active_slots == 0
    with pytest.raises(ZeroDivisionError), admitted(1):
        assert limit().active_slots == 1
        raise ZeroDivisionError
    assert limit().active_slots == 0


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Status codes with which the server turned requests for slots away."""
    ask = PrefectClient.increment_concurrency_slots_with_lease
    codes: list[int] = []

    async def listen(self: PrefectClient, *args: Any, **kwargs: Any) -> httpx.Response:
        try:
            return await ask(self, *args, **kwargs)
        except httpx.HTTPStatusError as error:
            codes.append(error.response.status_code)
            raise

    monkeypatch.setattr(PrefectClient, "increment_concurrency_slots_with_lease", listen)
    return codes


def test_a_second_training_waits_for_the_first(two_slots: None, refusals: list[int]) -> None:
    """It is turned away while the slots are held, and admitted once they are free."""
    let_in = threading.Event()

    def second() -> None:
        with admitted(2):
            let_in.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(second,))
    with admitted(2):
        thread.start()
        until(lambda: 423 in refusals, 90, "the second training is turned away")
        assert not let_in.is_set()
    until(let_in.is_set, 90, "the second training is admitted")  # Prefect asks again after up to 30 s
    thread.join(10)


def test_more_gpus_than_slots_is_an_error_not_an_endless_wait(two_slots: None) -> None:
    """Three GPUs of two slots could never be had; the error names both numbers."""
    with pytest.raises(UserError, match="needs 3 GPUs, .* is 2"), admitted(3):
        pass


def test_a_server_without_the_limit_admits_at_once() -> None:
    """A pool that nobody has deployed. Control: with a limit of two it was refused above."""
    entered = False
    with admitted(3):
        entered = True
    assert entered
