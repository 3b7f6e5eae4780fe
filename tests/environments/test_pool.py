"""The pool: episodes keep their state, the caller need not wait, and every way to fail ends the episode alone.

All of it holds for plain and for `async` environments; what holds for these alone is in test_async.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.pool import MOST_WORKERS, EnvironmentPool
from penstock.environments.worker import Call, Reply
from penstock.usercode.sandbox import obstacle
from penstock.usercode.workers import default_workers
from tests.processes import alive, noted


def config_of(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"type": "environment_examples:Misbehaves", "timeout_s": 0.3, "workers": 2, **settings})


@pytest.fixture(scope="module", params=["Misbehaves", "MisbehavesAsync"])
def name(request: pytest.FixtureRequest) -> str:
    """Of an environment."""
    return f"environment_examples:{request.param}"


@pytest.fixture(scope="module")
def pool(name: str, in_this_folder: None) -> Iterator[EnvironmentPool]:
    opened = EnvironmentPool(config_of(type=name, settings={"factor": 10}))
    yield opened
    opened.close()


def ask(pool: EnvironmentPool, *calls: Call) -> dict[str, Reply]:
    """All replies to the calls."""
    pool.ask(calls)
    found: dict[str, Reply] = {}
    while len(found) < len(calls):
        found |= pool.replies(wait_for=len(calls) - len(found))
    return found


def begin(pool: EnvironmentPool, *names: str, key: str = "k") -> dict[str, Reply]:
    return ask(pool, *(Call(name, row={"key": key}, seed=number) for number, name in enumerate(names)))


def test_every_episode_keeps_its_own_state_over_its_turns(name: str, in_this_folder: None) -> None:
    """300 episodes on two workers, asked in another order each turn; settings and seeds arrive.

    No call here is to time out, so the deadline is the one that a recipe without any has.
    """
    default_s = EnvironmentConfig.model_fields["timeout_s"].default
    names = [f"e{number}" for number in range(300)]
    with closing(EnvironmentPool(config_of(type=name, settings={"factor": 10}, timeout_s=default_s))) as pool:
        assert list(begin(pool, *names).values()) == [Reply()] * 300
        for turn in (1, 2, 3):
            replies = ask(pool, *(Call(name, text=f"<{name}>") for name in (names if turn % 2 else names[::-1])))
            for number, name in enumerate(names):
                assert replies[name] == Reply(f"k {turn} <{name}> {10 * number}", reward=0.5)


def test_reset_may_say_something(pool: EnvironmentPool) -> None:
    assert begin(pool, "hello", key="greets you") == {"hello": Reply("greets you")}


def test_halves_of_surrogate_pairs_become_question_marks(pool: EnvironmentPool) -> None:
    """In what the policy reads, in names of parts and in reasons: no tokenizer takes them, and no file.

    Control: text beyond ASCII, a whole pair included, stays.
    """
    begin(pool, "told", "failed", "whole")
    asked = {"told": "half a pair", "failed": "raise half a pair", "whole": "é \N{GRINNING FACE}"}
    replies = ask(pool, *(Call(name, text=text) for name, text in asked.items()))
    assert (replies["told"].observation, replies["told"].parts) == ("?", {"smil?": 1.0})
    assert str(replies["failed"].failure).startswith("LookupError: no file caf? (environment_examples.py:")
    assert replies["whole"].observation == "k 1 é \N{GRINNING FACE} 20"


FAILURES = {
    "raise": "LookupError: no such tool (environment_examples.py:",
    "sleep": "timed out after 0.3 s",
    "exit": "SystemExit: 3",
    "text": "TypeError: step returned a str, not a Step",
    "silent": "ValueError: step returned neither an observation nor done=True",
    "nan": "ValueError: the reward is nan",
    "bytes": "TypeError: the observation is a bytes, not text",
}


def test_a_failed_call_ends_its_episode_with_the_reason(pool: EnvironmentPool) -> None:
    """Others of the same workers go on."""
    names = [f"{word}-{copy}" for word in (*FAILURES, "fine") for copy in range(4)]
    begin(pool, *names)
    replies = ask(pool, *(Call(name, text=name.split("-")[0]) for name in names))
    for name in names:
        expected = FAILURES.get(name.split("-")[0])
        assert (replies[name].failure or "").startswith(expected or ""), replies[name]
        assert (replies[name].failure is None) == (expected is None)
    again = ask(pool, *(Call(name, text="more") for name in names))
    assert {name for name in names if again[name].failure is None} == {f"fine-{copy}" for copy in range(4)}


def test_a_reset_that_fails_is_a_failed_episode(pool: EnvironmentPool) -> None:
    (reply,) = begin(pool, "never", key="no start").values()
    assert reply.failure is not None
    assert reply.failure.startswith("LookupError: no such episode")


@pytest.mark.parametrize(
    ("word", "reason"), [("hang", "its worker was killed: a call took over 0.3 s"), ("die", "exit code 7")]
)
def test_a_lost_worker_takes_its_episodes_along_and_is_replaced(pool: EnvironmentPool, word: str, reason: str) -> None:
    """Those of the other worker go on; those of the lost one say so at their next turn; new episodes begin in both."""
    names = [f"{word}{number}" for number in range(20)]
    begin(pool, *names)
    (culprit,) = ask(pool, Call(names[0], text=word)).values()
    assert reason in str(culprit.failure)
    failures = {reply.failure for reply in ask(pool, *(Call(name, text="on") for name in names[1:])).values()}
    assert failures == {None, "lost with its worker process, which another episode took down"}
    fresh = [f"new-{name}" for name in names]
    assert all(reply.failure is None for reply in begin(pool, *fresh).values())


def test_the_caller_does_not_wait(name: str, in_this_folder: None) -> None:
    """A slow episode holds back neither the caller nor the episodes of the other worker."""
    names = [f"w{number}" for number in range(20)]
    with closing(EnvironmentPool(config_of(type=name, settings={"factor": 10}, timeout_s=3.0))) as pool:
        begin(pool, *names)
        asked = time.monotonic()
        pool.ask([Call(names[0], text="sleep")])
        assert pool.replies() == {}
        assert time.monotonic() - asked < 2.5
        found: dict[str, Reply] = {}
        pool.ask([Call(name, text="quick") for name in names[1:]])
        while len(found) < 20:
            found |= pool.replies(wait_for=1)
    assert list(found).index(names[0]) > 0, "somebody was faster"
    assert found[names[0]].failure == "timed out after 3 s"


def test_an_episode_is_dropped_when_it_is_over(pool: EnvironmentPool) -> None:
    """After a last call, after done, and when it is abandoned. Control: before that the next turn is answered."""
    begin(pool, "last", "done", "left")
    assert ask(pool, Call("last", text="a", last=True), Call("left", text="a"))["last"].failure is None
    assert ask(pool, Call("done", text="parts"))["done"] == Reply(
        done=True, reward=1.5, parts={"right": 1.0, "polite": 0.5}
    )
    pool.abandon(["left"])
    replies = ask(pool, *(Call(name, text="b") for name in ("last", "done", "left")))
    assert all(str(reply.failure).startswith("lost") for reply in replies.values())


def test_abandoned_episodes_are_silent_and_not_awaited(pool: EnvironmentPool) -> None:
    """Those whose call is under way, those that wait in the queue, and those that are doing nothing; others go on.

    Controls: before, all are awaited, and an episode that stayed still knows its turns.
    """
    names = [f"a{number}" for number in range(12)]
    begin(pool, *names)
    pool.ask([Call(name, text="sleep") for name in names[:6]])
    pool.ask([Call(name, text="on") for name in names[6:10]])
    assert pool.awaited == 10
    pool.abandon([*names[:4], *names[6:8], names[10], "nobody"])
    assert pool.awaited == 4
    found: dict[str, Reply] = {}
    while pool.awaited:
        found |= pool.replies(wait_for=99)
    assert {name: reply.failure is None for name, reply in found.items()} == {
        **dict.fromkeys(names[4:6], False),
        **dict.fromkeys(names[8:10], True),
    }
    again = ask(pool, *(Call(name, text="again") for name in names[8:12]))
    assert [(again[name].observation or "")[:3] for name in names[8:12]] == ["k 2", "k 2", "", "k 1"]
    assert str(again[names[10]].failure).startswith("lost")


def test_the_name_of_an_abandoned_episode_may_begin_another(pool: EnvironmentPool) -> None:
    """Its call that was under way answers nothing of the new one."""
    begin(pool, "again")
    pool.ask([Call("again", text="sleep")])
    pool.abandon(["again"])
    assert (pool.awaited, pool.replies(wait_for=1)) == (0, {})
    assert begin(pool, "again", key="greets anew") == {"again": Reply("greets anew")}
    assert ask(pool, Call("again", text="x"))["again"] == Reply("greets anew 1 x 0", reward=0.5)


def test_replies_of_other_episodes_stay_until_they_are_asked_for(pool: EnvironmentPool) -> None:
    """Who asks for some is not held up by the others. Controls: an abandoned one's is gone; without names all come."""
    begin(pool, "mine", "others", "third", "fourth")
    pool.ask([Call(name, text="quick") for name in ("others", "third", "fourth", "mine")])
    assert pool.replies(wait_for=1, of={"mine"}).keys() == {"mine"}
    while pool.awaited:
        assert pool.replies(of={"mine"}) == {}
    assert pool.replies(wait_for=1, of={"others"}).keys() == {"others"}
    pool.abandon(["third"])
    assert pool.replies().keys() == {"fourth"}


def test_what_an_episode_starts_ends_with_its_worker(in_this_folder: None, tmp_path: Path) -> None:
    """Children that got away in every way there is. Control: they live as long as the pool."""
    other = EnvironmentPool(config_of(workers=1, timeout_s=60.0))
    begin(other, "leaver", key=str(tmp_path))
    ask(other, Call("leaver", text="leave"))
    children = noted(tmp_path)
    assert list(map(alive, children)) == [True] * 3
    other.close()
    assert not any(map(alive, children))


def test_workers_grow_with_an_engines_cores_unless_the_recipe_says_how_many(
    in_this_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a machine share its cores; a laptop keeps two processes. Control: a recipe that says how many."""
    assert [default_workers(cores, MOST_WORKERS) for cores in (1, 2, 6, 16, 64)] == [2, 2, 3, 8, 8]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for workers, expected in ((None, 3), (1, 1)):
        with closing(EnvironmentPool(config_of(workers=workers, timeout_s=20.0))) as opened:
            assert len(opened._workers) == expected


def test_the_workers_end_with_the_pool(in_this_folder: None) -> None:
    """No process is left."""
    other = EnvironmentPool(config_of(workers=1))
    (process,) = other._workers[0]._workers._pool._pool_manager.worker_manager.workers.values()
    other.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.skipif(bool(obstacle()), reason="no sandbox on this machine")
@pytest.mark.parametrize("boxed", [True, False])
def test_episodes_live_in_a_sandbox_where_the_recipe_asks_for_one(
    boxed: bool, name: str, in_this_folder: None, tmp_path: Path
) -> None:
    """They keep their state there; what they write fails them alone. Control: without `sandbox` it is written."""
    limits = {"memory_gib": 1.0, "processes": 8, "network": False, "variables": []}
    sandbox = limits | {"read": [str(tmp_path)]} if boxed else None
    with closing(EnvironmentPool(config_of(type=name, workers=1, timeout_s=20.0, sandbox=sandbox))) as other:
        assert list(other.stop) == ["!"]
        begin(other, "one", "two", key=str(tmp_path))
        reply = ask(other, Call("one", text="leave"))["one"]
        assert ("Read-only file system" in (reply.failure or "")) == boxed
        assert bool(noted(tmp_path)) != boxed
        for turn in (1, 2):
            assert ask(other, Call("two", text="x"))["two"] == Reply(f"{tmp_path} {turn} x 1", reward=0.5)
