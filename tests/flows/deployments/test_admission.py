"""Trainings and GPUs: slots are held whole and given back, and nobody without need or without a limit waits."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from configs.schema import TrainConfig
from penstock.base.errors import UserError
from penstock.session.machines import admission as module
from penstock.session.machines.admission import GPU_SLOTS, admission
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("prefect_harness")


@pytest.fixture
def two_slots(prefect_harness: None) -> Iterator[None]:
    """A limit of two GPU slots on the server, for one test."""
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPU_SLOTS, limit=2))
        yield
        client.delete_global_concurrency_limit_by_name(GPU_SLOTS)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that this machine shows so many GPUs; nothing here touches one."""

    def show(count: int) -> None:
        monkeypatch.setattr(module, "visible_gpus", lambda: list(range(count)))

    return show


def limit() -> Any:
    """Return the limit as the server has it."""
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(GPU_SLOTS)


def test_a_training_holds_a_slot_per_gpu_and_gives_them_back(two_slots: None, gpus: Callable[[int], None]) -> None:
    """All slots at once, also given back when the training fails; a training on CPU ranks takes none."""
    gpus(2)
    with admission(TrainConfig()):
        assert limit().active_slots == 2
        gpus(0)
        with admission(TrainConfig()):
            assert limit().active_slots == 2
    assert limit().active_slots == 0
    gpus(1)
    with pytest.raises(ZeroDivisionError), admission(TrainConfig()):
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


def test_a_second_training_waits_for_the_first(
    two_slots: None, gpus: Callable[[int], None], refusals: list[int]
) -> None:
    """It is turned away while the slots are held, and admitted once they are free."""
    gpus(2)
    admitted = threading.Event()

    def second() -> None:
        with admission(TrainConfig()):
            admitted.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(second,))
    with admission(TrainConfig()):
        thread.start()
        until(lambda: 423 in refusals, 90, "the second training is turned away")
        assert not admitted.is_set()
    until(admitted.is_set, 90, "the second training is admitted")  # Prefect asks again after up to 30 s
    thread.join(10)


def test_more_gpus_than_slots_is_an_error_not_an_endless_wait(two_slots: None, gpus: Callable[[int], None]) -> None:
    """Three GPUs of two slots could never be had; the error names both numbers."""
    gpus(3)
    with pytest.raises(UserError, match="needs 3 GPUs, .* is 2"), admission(TrainConfig()):
        pass


def test_a_server_without_the_limit_admits_at_once(gpus: Callable[[int], None]) -> None:
    """A run from a terminal, never deployed, is admitted. Control: with a limit of two it was refused above."""
    gpus(3)
    entered = False
    with admission(TrainConfig()):
        entered = True
    assert entered
