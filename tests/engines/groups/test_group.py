"""An engine group answers in order, each call its own, and what may begins while others are pending.

All ranks here are real processes; their worker is a small one, because the group does not care what a command means.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.engines.groups.environment import WITHHELD_VARIABLES
from penstock.engines.groups.group import EngineError, EngineGroup, RankLost
from tests.engines.groups.small_ranks import pids_of, spec
from tests.processes import alive, words_of
from tests.waiting import came_true


def _write(path: Path, text: str = "there") -> None:
    """Write a file that others wait for: once it is there, so is all of its text."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


# ---- commands and replies -------------------------------------------------------------------------------------------


def test_every_rank_answers_in_rank_order(shared: EngineGroup) -> None:
    """Reply i is rank i's, every rank is its own process, and arguments arrive unchanged."""
    replies = shared.call("echo", key="order", text="hello", numbers=[1, 2.5, None])
    assert [reply["rank"] for reply in replies] == [0, 1]
    assert len({reply["pid"] for reply in replies} | {os.getpid()}) == 3
    assert all(reply["text"] == "hello" and reply["numbers"] == [1, 2.5, None] for reply in replies)
    assert all((reply["world_size"], reply["gpu"]) == (2, None) for reply in replies)


def test_a_ranks_log_tells_how_long_each_command_took(shared: EngineGroup) -> None:
    """Once it has ended, in the log of every rank. Control: a key that nobody used."""
    shared.call("sleep", key="timed", seconds=0.3)
    for log in (shared.spec.log_dir / f"main-rank{rank}.log" for rank in range(2)):
        (line,) = (line for line in log.read_text().splitlines() if "sleep (timed)" in line)
        assert 0.3 <= float(line.split()[-2]) < 10
        assert "sleep (unused)" not in log.read_text()


def test_per_rank_arguments_reach_their_rank_only(shared: EngineGroup) -> None:
    """Each rank gets the shared arguments with its own over them."""
    replies = shared.call("echo", key="own", per_rank=[{"mine": 10}, {"mine": 11, "both": "b"}], both="a")
    assert [(reply["mine"], reply["both"]) for reply in replies] == [(10, "a"), (11, "b")]
    with pytest.raises(ValueError, match="arguments for 1 ranks"):
        shared.call("echo", key="too few", per_rank=[{}])


def test_arrays_cross_and_what_cannot_cross_is_never_sent(shared: EngineGroup) -> None:
    """An argument the channel refuses reaches no rank, and the group lives on."""
    tokens_T = np.arange(1_000_000, dtype=np.int32)
    for reply in shared.call("echo", key="array", tokens_T=tokens_T):
        assert np.array_equal(reply["tokens_T"], tokens_T)
    before = shared.call("count", key="before refusal")[0]["handled"]
    with pytest.raises(TypeError, match="channel carries"):
        shared.call("echo", key="refused", per_rank=[{}, {"value": np.array([object()])}])
    assert [r["handled"] for r in shared.call("count", key="after refusal")] == [before + 1] * 2


def test_a_repeated_key_returns_the_stored_reply(shared: EngineGroup) -> None:
    """Idempotency: a retried command does not run again; a new key does."""
    first = shared.call("count", key="once")
    assert shared.call("count", key="once") == first
    assert [r["handled"] for r in shared.call("count", key="twice")] == [r["handled"] + 1 for r in first]


def test_news_comes_before_the_reply_and_to_who_listens_alone(shared: EngineGroup) -> None:
    """Each rank's in its order, and the reply that is there first counts as news. A repeated command tells nothing."""
    heard: list[dict[str, Any]] = []
    replies = shared.call("count_aloud", key="aloud", to=3, on_news=heard.append)
    assert [reply["counted"] for reply in replies] == [3, 3]
    for rank in range(2):
        assert [news["number"] for news in heard if news["rank"] == rank and "number" in news] == [0, 1, 2]
    assert len([news for news in heard if "counted" in news]) == 1

    heard.clear()
    assert shared.call("count_aloud", key="aloud", to=3, on_news=heard.append) == replies
    assert [news for news in heard if "number" in news] == []
    assert [reply["counted"] for reply in shared.call("count_aloud", key="unheard", to=2)] == [2, 2]


def test_a_reply_is_heard_while_another_rank_works(shared: EngineGroup, tmp_path: Path) -> None:
    """Rank 1 replies once the news of rank 0's reply has arrived here."""
    heard: list[int] = []

    def hear(news: dict[str, Any]) -> None:
        heard.append(news["rank"])
        (tmp_path / "heard").touch()

    shared.call("reply_after", key="after", path=str(tmp_path / "heard"), on_news=hear)
    assert heard == [0]


def test_a_reply_does_not_wait_for_what_follows_it_and_the_next_command_does(
    group: EngineGroup, tmp_path: Path
) -> None:
    """The file that the workers wait for after their reply is written when the reply is there."""
    path = tmp_path / "now"
    assert group.call("tidy_afterwards", key="first", path=str(path)) == [{"tidied": []}] * 2
    _write(path, "tidied")
    assert group.call("tidy_afterwards", key="second", path=str(path)) == [{"tidied": ["tidied"]}] * 2


@pytest.mark.slow
def test_what_would_fail_after_an_error_does_not_hide_it(group: EngineGroup) -> None:
    """The other rank still works when the first one has failed, and would fail again after its reply."""
    with pytest.raises(EngineError, match="the loss is not finite"):
        group.call("break_slowly", key="b")


def test_only_the_last_32_replies_are_kept(shared: EngineGroup) -> None:
    """A rank's memory does not grow with the length of the training."""
    first = shared.call("count", key="old")
    for index in range(32):
        shared.call("count", key=f"newer {index}")
    assert shared.call("count", key="old") != first


def test_ranks_know_their_place(shared: EngineGroup) -> None:
    """The variables of torch.distributed are set."""
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "PENSTOCK_GROUP",
        "DS_ACCELERATOR",
        "CUDA_VISIBLE_DEVICES",
    ]
    for rank, reply in enumerate(shared.call("environment", key="names", names=names)):
        assert list(reply.values()) == [str(rank), str(rank), "2", "127.0.0.1", "main", "cpu", ""]
    ports = [r["MASTER_PORT"] for r in shared.call("environment", key="port", names=["MASTER_PORT"])]
    assert ports[0] == ports[1]


def test_no_secret_is_in_what_a_process_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the channel's keys nor the flow's passwords: not in the environment or the command line of any rank.

    The kernel keeps both as they were at the start, and children inherit the first. Control: what is no secret is seen.
    """
    for name in WITHHELD_VARIABLES:
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("HARMLESS", "porridge")
    with EngineGroup(spec(tmp_path)) as group:
        address = group._listener.address
        group.wait_ready()
        host = psutil.Process(group._own_hosts._child.pid)
        processes = host.children(recursive=True)
        assert sum("penstock.engines.groups.rank" in words_of(process) for process in processes) == 2
        for process in [host, *processes]:
            told = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
            if b"penstock.engines.groups.rank" in told:
                assert b"porridge" in told
            for secret in ("sesame", address.client_secret, address.client_public, address.server_public):
                assert secret.encode() not in told


def test_groups_work_side_by_side(shared: EngineGroup, tmp_path: Path) -> None:
    """Two groups called from two threads both answer, each with its own ranks."""
    with EngineGroup(spec(tmp_path, name="critic")) as critic, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(group.call, "echo", key=f"side {i}") for i in range(5) for group in (shared, critic)]
        pids = [tuple(reply["pid"] for reply in future.result(30)) for future in asked]
    assert len(set(pids[0::2])) == len(set(pids[1::2])) == 1
    assert not set(pids[0]) & set(pids[1])


# ---- commands side by side ------------------------------------------------------------------------------------------


def test_a_command_that_may_is_answered_while_an_earlier_one_is_pending(shared: EngineGroup, tmp_path: Path) -> None:
    """The later reply comes first, and each goes to its own call. Control: before the file is there nothing is."""
    pending = shared.begin("wait_for", key="pending", path=str(tmp_path / "file"))
    replies = shared.call("echo", key="meanwhile", text="hello")
    assert [reply["text"] for reply in replies] == ["hello"] * 2
    assert not pending.answered
    assert shared.call("echo", key="meanwhile", text="hello") == replies, "a repeated key is answered at once, too"
    _write(tmp_path / "file")
    assert shared.replies(pending) == [{"rank": rank, "text": "there"} for rank in range(2)]
    assert shared.replies(pending) == shared.call("wait_for", key="pending", path=str(tmp_path / "file"))


def test_a_command_that_may_not_waits_and_nothing_overtakes_it(shared: EngineGroup, tmp_path: Path) -> None:
    """It is carried out once nothing is pending, and what came behind it afterwards, though that might have begun."""
    before = shared.call("count", key="before waiting")[0]["handled"]
    pending = [shared.begin("wait_for", key=name, path=str(tmp_path / name)) for name in ("one", "two")]
    waits = shared.begin("count", key="waits")
    behind = shared.begin("echo", key="behind")
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(shared.replies, pending[0])
        assert not came_true(lambda: waits.answered or behind.answered, within_s=0.5)
        _write(tmp_path / "one")
        read.result(20)
        assert not came_true(lambda: waits.answered or behind.answered, within_s=0.5)
    _write(tmp_path / "two")
    assert [reply["handled"] for reply in shared.replies(waits)] == [before + 3] * 2
    assert [reply["rank"] for reply in shared.replies(behind)] == [0, 1]
    assert pending[1].answered, "by whoever read"


def test_calls_of_several_threads_get_their_own_replies_and_news(shared: EngineGroup, tmp_path: Path) -> None:
    """One thread waits all the time; sending does not wait for it to stop reading."""
    heard: dict[int, list[int]] = {number: [] for number in range(4)}

    def speak(number: int) -> None:
        shared.call(
            "echo", key=f"thread {number}", number=number, on_news=lambda news: heard[number].append(news["number"])
        )

    with ThreadPoolExecutor(5) as threads:
        reading = threads.submit(shared.call, "wait_for", key="reading", path=str(tmp_path / "read"))
        for asked in [threads.submit(speak, number) for number in range(4)]:
            asked.result(20)
        assert not reading.done()
        _write(tmp_path / "read")
        assert [reply["rank"] for reply in reading.result(20)] == [0, 1]
    assert all(set(found) <= {number} for number, found in heard.items())
    assert sum(map(len, heard.values())) == 4, "of two replies the first is news"


def test_a_command_that_is_unanswered_is_not_sent_twice_under_one_key(shared: EngineGroup, tmp_path: Path) -> None:
    """Nobody could tell the replies apart. Controls: another key; another command; the same once it is answered."""
    arguments = {"path": str(tmp_path / "twice")}
    first = shared.begin("wait_for", key="twice", **arguments)
    with pytest.raises(ValueError, match="not answered yet under the key 'twice'"):
        shared.begin("wait_for", key="twice", **arguments)
    other = shared.begin("wait_for", key="another", **arguments)
    shared.call("echo", key="twice")
    _write(tmp_path / "twice")
    assert shared.replies(first) == shared.replies(other) == shared.call("wait_for", key="twice", **arguments)


def test_what_fails_in_a_step_fails_the_call_and_ends_the_group(group: EngineGroup, tmp_path: Path) -> None:
    """The command that was pending is named, and a call behind it is told, too."""
    pids = pids_of(group)
    pending = group.begin("wait_for", key="pending", path=str(tmp_path / "file"), fails=True)
    group.begin("count", key="behind")
    _write(tmp_path / "file")
    with pytest.raises(EngineError, match="'wait_for' raised") as caught:
        group.replies(pending)
    assert "ArithmeticError: the loss is not finite" in caught.value.remote_traceback
    assert not any(map(alive, pids))


def test_a_failure_reaches_whoever_waits(group: EngineGroup, tmp_path: Path) -> None:
    """Who has asked for it gets the error itself; a thread that waits for another command does not wait for ever."""
    group.wait_ready()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(group.call, "wait_for", key="never", path=str(tmp_path / "never"))
        assert not came_true(waiting.done, within_s=0.3)
        with pytest.raises(EngineError, match="'fail' raised"):
            group.call("fail", key="f", rank=1)
        with pytest.raises((EngineError, RuntimeError), match=r"'fail' raised|has ended"):
            waiting.result(20)


@pytest.mark.slow
def test_the_deadline_of_a_call_does_not_count_while_an_earlier_one_is_unanswered(
    group: EngineGroup, tmp_path: Path
) -> None:
    """It may have to wait for that. Control: without one the same call misses its deadline."""
    pending = group.begin("wait_for", key="pending", path=str(tmp_path / "file"))
    late = group.begin("sleep", key="late", seconds=0.1, timeout_s=0.6)
    threading.Timer(1.5, _write, (tmp_path / "file",)).start()
    group.replies(pending)
    assert group.replies(late) == [{}, {}]
    with pytest.raises(RankLost, match="no reply to 'sleep' within 0.6 s"):
        group.call("sleep", key="too late", seconds=5.0, timeout_s=0.6)


def test_the_end_of_a_group_gives_up_what_is_pending(group: EngineGroup, tmp_path: Path) -> None:
    """Nobody has to wait for it: neither who closes, nor who has asked."""
    pids = pids_of(group)
    pending = group.begin("wait_for", key="pending", path=str(tmp_path / "never"))
    group.call("echo", key="begun")
    group.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed during 'wait_for'"):
        group.replies(pending)
