"""Environments that wait: the calls of a worker's episodes run concurrently, and none of them holds up another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments import worker
from penstock.environments.environment import Step
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Answered, AsyncPlayer, Call, Reply
from penstock.usercode.sandbox import obstacle
from tests.waiting import came_true

LONG_S = 60.0


def open_pool(name: str = "Waits", timeout_s: float = LONG_S, **settings: Any) -> EnvironmentPool:
    """One worker, so that all calls are the same process's."""
    section = {"type": f"environment_examples:{name}", "workers": 1, "timeout_s": timeout_s, **settings}
    return EnvironmentPool(EnvironmentConfig.model_validate(section))


@pytest.fixture(scope="module")
def patient(in_this_folder: None) -> Iterator[EnvironmentPool]:
    """No call of its tests may end by its deadline."""
    with closing(open_pool()) as opened:
        yield opened


@pytest.fixture(scope="module")
def hasty(in_this_folder: None) -> Iterator[EnvironmentPool]:
    """A deadline of 0.3 s."""
    with closing(open_pool(timeout_s=0.3)) as opened:
        yield opened


def begin(pool: EnvironmentPool, *names: str) -> None:
    pool.ask([Call(name, row={"key": name}) for name in names])
    assert pool.replies(wait_for=len(names)) == {name: Reply("fine") for name in names}


def say(pool: EnvironmentPool, name: str, text: str) -> Reply:
    """The reply to one call, whatever else is under way."""
    pool.ask([Call(name, text=text)])
    found = pool.replies(wait_for=1)
    assert found.keys() == {name}
    return found[name]


def test_the_calls_of_a_worker_are_under_way_at_a_time(patient: EnvironmentPool) -> None:
    """200 that wait for each other, more than a chunk of plain calls: `reset` and `step`. Order holds in an episode."""
    names = [f"m{number}" for number in range(200)]
    patient.ask([Call(name, row={"key": "meet 200"}) for name in names])
    assert patient.replies(wait_for=200) == {name: Reply("fine") for name in names}
    for turn in (1, 2, 3):
        patient.ask([Call(name, text="meet 200") for name in (names if turn % 2 else names[::-1])])
        assert patient.replies(wait_for=200) == {name: Reply(f"{turn}: fine") for name in names}


def test_plain_environments_are_answered_in_turn(in_this_folder: None) -> None:
    """The control of the one above: two calls that wait for each other never meet."""
    with closing(open_pool("MeetsInTurn", timeout_s=0.3)) as pool:
        pool.ask([Call(name, row={"key": "-"}) for name in "ab"])
        assert [reply.failure for reply in pool.replies(wait_for=2).values()] == ["timed out after 0.3 s"] * 2


def test_answers_come_while_other_calls_of_the_worker_wait(patient: EnvironmentPool) -> None:
    """One episode waits at a door; another plays whole turns meanwhile, and only then opens it."""
    begin(patient, "waiter", "player")
    patient.ask([Call("waiter", text="pass")])
    for turn in range(1, 6):
        assert say(patient, "player", "on") == Reply(f"{turn}: fine")
    assert patient.awaited == 1
    patient.ask([Call("player", text="open")])
    assert patient.replies(wait_for=2) == {"player": Reply("6: fine"), "waiter": Reply("1: fine")}


class _Holds:
    """Each `reset` holds the event loop up for a millisecond, as a request of an agent does."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        time.sleep(0.001)
        return "fine"

    async def step(self, text: str) -> Step:
        return Step("fine")


def begun_together(count: int) -> tuple[AsyncPlayer, Answered]:
    """A player, and what it hands back first of calls that came in one message."""
    player = AsyncPlayer(_Holds, LONG_S)
    return player, player.answer({number: Call(str(number), row={}) for number in range(count)})


def test_the_first_of_many_calls_are_handed_back_before_the_last_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an engine has work meanwhile; dropped calls get no reply, begun or not. Control: all begin at once."""
    count = 8 * worker.AT_ONCE
    player, first = begun_together(count)
    assert 0 < len(first.replies) < count and {*first.replies, *first.under_way} == {*range(count)}
    *dropped, kept = first.under_way
    assert player.drop([str(number) for number in dropped]).under_way == [kept]
    while not (replies := player.answer({}).replies):
        pass
    assert [*replies] == [kept] and player.answer({}) == Answered({}, [])
    monkeypatch.setattr(worker, "AT_ONCE", count)
    assert len(begun_together(count)[1].replies) == count


def test_a_plain_method_beside_a_coroutine(in_this_folder: None) -> None:
    """`reset` is plain here, and steps still meet."""
    with closing(open_pool("HalfAsync")) as pool:
        pool.ask([Call(name, row={"key": "-"}) for name in "abc"])
        assert pool.replies(wait_for=3) == {name: Reply() for name in "abc"}
        pool.ask([Call(name, text="meet 3") for name in "abc"])
        assert pool.replies(wait_for=3) == {name: Reply("1: fine") for name in "abc"}


@pytest.mark.parametrize("word", ["stay", "cling"])
def test_a_call_that_times_out_fails_alone(hasty: EnvironmentPool, word: str) -> None:
    """Also one that catches its cancellation: the process lives on, and others keep their state."""
    begin(hasty, f"late {word}", f"other {word}")
    assert say(hasty, f"other {word}", "on") == Reply("1: fine")
    assert say(hasty, f"late {word}", word) == Reply(failure="timed out after 0.3 s")
    observation = say(hasty, f"other {word}", "cancelled").observation
    assert f"late {word}" in str(observation)
    assert str(observation).startswith("2: ")
    assert str(say(hasty, f"late {word}", "on").failure).startswith("lost")


def test_a_call_that_blocks_the_loop_is_ended_with_its_worker(hasty: EnvironmentPool) -> None:
    """All that were under way say so, the others at their next turn, and new episodes begin."""
    begin(hasty, "blocks", "waits", "rests")
    hasty.ask([Call("blocks", text="block"), Call("waits", text="stay")])
    reason = "its worker was killed: a call took over 0.3 s, in code that could not be interrupted"
    assert hasty.replies(wait_for=2) == dict.fromkeys(("blocks", "waits"), Reply(failure=reason))
    assert str(say(hasty, "rests", "on").failure).startswith("lost")
    begin(hasty, "blocks")


def test_a_worker_that_dies_while_nobody_asks_it_is_missed(patient: EnvironmentPool) -> None:
    """The next process does not know its calls, so nobody waits for them."""
    begin(patient, "dies", "waits")
    patient.ask([Call("dies", text="die"), Call("waits", text="stay")])
    time.sleep(1.0)
    found: dict[str, Reply] = {}
    while patient.awaited:
        found |= patient.replies(wait_for=1)
    assert found.keys() == {"dies", "waits"}
    assert all("its worker process died" in str(reply.failure) for reply in found.values())
    begin(patient, "dies")


def test_abandoned_calls_are_cancelled(patient: EnvironmentPool) -> None:
    """Also one that catches it; the door-keeper's, which was not abandoned, goes on."""
    everyone = ["one", "two", "three"]
    for gone in (everyone[:2], everyone):
        begin(patient, *everyone)
        patient.ask([Call("one", text="stay"), Call("two", text="cling"), Call("three", text="stay")])
        begin_another = [Call("looks", row={"key": "cancelled"})]
        patient.ask(begin_another)
        before = patient.replies(wait_for=1)["looks"].observation
        patient.abandon(gone)
        patient.ask(begin_another)
        after = patient.replies(wait_for=1)["looks"].observation
        new = str(after).removeprefix(str(before or "")).split()
        assert sorted(new) == sorted(gone)
        patient.abandon([*everyone, "looks"])
        assert (patient.awaited, patient.replies(wait_for=1)) == (0, {})


@pytest.mark.skipif(bool(obstacle()), reason="no sandbox on this machine")
def test_in_a_sandbox_a_process_of_a_call_lives_as_long_as_calls_are_under_way(in_this_folder: None) -> None:
    """Hand-backs meanwhile do not end it. Control: what was left behind has ended once nothing is under way."""
    sandbox = {"memory_gib": 1.0, "processes": 8, "network": False, "variables": []}
    with closing(open_pool(sandbox=sandbox)) as pool:
        begin(pool, "runs", "leaves", "waits")
        pool.ask([Call("waits", text="stay")])
        left = str(say(pool, "leaves", "leave").observation).removeprefix("1: ")
        assert say(pool, "runs", "run") == Reply("1: 0")
        assert say(pool, "leaves", f"alive {left}") == Reply("2: True")
        pool.abandon(["waits"])
        assert say(pool, "leaves", "on") == Reply("3: fine")
        assert came_true(lambda: str(say(pool, "leaves", f"alive {left}").observation).endswith(": False"), 20)
