"""An engine group answers in order, names the rank that fails, and never leaves a process behind.

All ranks here are real processes; their worker is the small one below, because the group does not care what a
command means.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engines.groups.channel import Tell
from engines.groups.environment import WITHHELD_VARIABLES
from engines.groups.group import EngineError, EngineGroup, GroupSpec, RankDevice, RankLost
from engines.groups.processes import ROTATE_ABOVE_BYTES
from penstock.base.errors import UserError
from tests.processes import alive, leave_children, noted
from tests.waiting import came_true


class SmallWorker:
    """The rank's side of these tests: one method per command."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        self.rank, self.world_size, self.gpu = rank, world_size, gpu
        self.handled = 0
        self.tidied: list[str] = []
        self.awaited: Path | None = None
        self.broken = False

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | Waiting:
        self.handled += 1
        self.tell = tell
        result: dict[str, Any] | Waiting = getattr(self, command)(**arguments)
        return result

    def after_reply(self) -> None:
        if self.broken:
            raise OSError("the device answers no more")
        if self.awaited is not None:
            came_true(self.awaited.exists, 20)
            self.tidied.append(self.awaited.read_text())
            self.awaited = None

    def close(self) -> None:
        atexit.register(print, "taken apart")
        print("closed in order")

    def echo(self, **arguments: Any) -> dict[str, Any]:
        return arguments | {"rank": self.rank, "world_size": self.world_size, "gpu": self.gpu, "pid": os.getpid()}

    def count(self) -> dict[str, Any]:
        return {"handled": self.handled}

    def tidy_afterwards(self, path: str) -> dict[str, Any]:
        self.awaited = Path(path)
        return {"tidied": list(self.tidied)}

    def break_slowly(self) -> dict[str, Any]:
        self.broken = True
        if self.rank == 0:
            raise ArithmeticError("the loss is not finite")
        return self.sleep(4.0)

    def sleep(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {}

    def environment(self, names: list[str]) -> dict[str, Any]:
        return {name: os.environ.get(name) for name in names}

    def fail(self, rank: int) -> dict[str, Any]:
        if self.rank == rank:
            raise ArithmeticError("the loss is not finite")
        return {}

    def refuse(self) -> dict[str, Any]:
        raise UserError("the recipe asks for too much", "ask for less")

    def leave(self, rank: int) -> dict[str, Any]:
        if self.rank == rank:
            sys.exit(3)
        return self.ponder_for_ever()

    def ponder_for_ever(self) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    def hold_the_lock(self, seconds: int) -> dict[str, Any]:
        noted: list[float] = []
        other = threading.Timer(0.5, lambda: noted.append(time.monotonic()))
        other.start()
        ctypes.PyDLL(None).sleep(seconds)  # which does not let go of the interpreter lock
        ended = time.monotonic()
        other.join()
        return {"others_ran": noted[0] < ended - 0.1}

    def leave_children(self, folder: str) -> dict[str, Any]:
        leave_children(folder)
        return {}

    def count_aloud(self, to: int) -> dict[str, Any]:
        for number in range(to):
            self.tell({"rank": self.rank, "number": number})
        return {"rank": self.rank, "counted": to}

    def reply_after(self, path: str) -> dict[str, Any]:
        if self.rank == 1:
            came_true(Path(path).exists, 20)
        return {"rank": self.rank}

    def unpackable(self) -> dict[str, Any]:
        return {"value": object()}

    def wait_for(self, path: str, fails: bool = False) -> Waiting:
        return Waiting(Path(path), fails, self.rank)


class Waiting:
    """A command that is pending until a file is there; commands that echo or fail may begin meanwhile."""

    def __init__(self, path: Path, fails: bool, rank: int) -> None:
        self._path, self._fails, self._rank = path, fails, rank
        self.result: dict[str, Any] | None = None

    def admitted(self, commands: Sequence[str]) -> int:
        return len(list(takewhile(lambda name: name in ("echo", "fail", "wait_for"), commands)))

    def step(self) -> None:
        time.sleep(0.001)
        if self._path.exists():
            if self._fails:
                raise ArithmeticError("the loss is not finite")
            self.result = {"rank": self._rank, "text": self._path.read_text()}


class UnbuildableWorker(SmallWorker):
    """Fails as a missing checkpoint would."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        raise OSError("no weights here")


class SlowWorker(SmallWorker):
    """Rank 1 never becomes ready."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(rank, world_size, gpu)
        if rank == 1:
            self.ponder_for_ever()


def _spec(folder: Path, **changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "name": "main",
        "roles": ("actor",),
        "devices": (RankDevice(None), RankDevice(None)),
        "log_dir": folder,
        "start_timeout_s": 60.0,
        "command_timeout_s": 60.0,
        "heartbeat_timeout_s": 60.0,
        "worker": f"{__name__}:SmallWorker",
    }
    return GroupSpec(**values | changes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    """One healthy group for every test that does it no harm."""
    with EngineGroup(_spec(tmp_path_factory.mktemp("logs"))) as group:
        yield group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[EngineGroup]:
    """A group of its own for a test that breaks it."""
    with EngineGroup(_spec(tmp_path)) as group:
        yield group


def _pids(group: EngineGroup) -> list[int]:
    return [reply["pid"] for reply in group.call("echo", key="pids")]


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
    path.write_text("tidied")
    assert group.call("tidy_afterwards", key="second", path=str(path)) == [{"tidied": ["tidied"]}] * 2


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
    with EngineGroup(_spec(tmp_path)) as group:
        address = group._listener.address
        group.wait_ready()
        host = psutil.Process(group._own_hosts._child.pid)
        processes = host.children(recursive=True)
        assert sum("engines.groups.rank" in process.cmdline() for process in processes) == 2
        for process in [host, *processes]:
            told = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
            if b"engines.groups.rank" in told:
                assert b"porridge" in told
            for secret in ("sesame", address.client_secret, address.client_public, address.server_public):
                assert secret.encode() not in told


def test_groups_work_side_by_side(shared: EngineGroup, tmp_path: Path) -> None:
    """Two groups called from two threads both answer, each with its own ranks."""
    with EngineGroup(_spec(tmp_path, name="critic")) as critic, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(group.call, "echo", key=f"side {i}") for i in range(5) for group in (shared, critic)]
        pids = [tuple(reply["pid"] for reply in future.result(30)) for future in asked]
    assert len(set(pids[0::2])) == len(set(pids[1::2])) == 1
    assert not set(pids[0]) & set(pids[1])


# ---- commands side by side ------------------------------------------------------------------------------------------


def _write(path: Path, text: str = "there") -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


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
    pids = _pids(group)
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
    pids = _pids(group)
    pending = group.begin("wait_for", key="pending", path=str(tmp_path / "never"))
    group.call("echo", key="begun")
    group.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed during 'wait_for'"):
        group.replies(pending)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_an_exception_names_its_rank_and_ends_the_group(group: EngineGroup) -> None:
    """EngineError carries rank, command and remote traceback, survives pickling, and leaves no process."""
    pids = _pids(group)
    with pytest.raises(EngineError) as caught:
        group.call("fail", key="f", rank=1)
    error = caught.value
    assert (error.group, error.rank, error.command) == ("main", 1, "fail")
    assert "ArithmeticError: the loss is not finite" in error.remote_traceback
    assert "in fail" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "ArithmeticError" in error.log_file.read_text()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="has ended"):
        group.call("echo", key="after")


def test_a_user_error_arrives_as_itself(group: EngineGroup) -> None:
    """A user's mistake found in a rank keeps its problem and remedy, and loses its traceback."""
    with pytest.raises(UserError) as caught:
        group.call("refuse", key="r")
    assert (caught.value.problem, caught.value.remedy) == ("the recipe asks for too much", "ask for less")


def test_a_reply_that_cannot_cross_is_the_rank_s_error(group: EngineGroup) -> None:
    """A worker that returns what the channel refuses is told so by name."""
    with pytest.raises(EngineError, match="channel carries plain data"):
        group.call("unpackable", key="u")


def test_a_command_of_another_epoch_is_refused(group: EngineGroup) -> None:
    """A rank of epoch 0 does not obey a flow that has moved on, not even with a stored reply."""
    group.call("count", key="c")
    group.epoch = 1
    with pytest.raises(EngineError, match="epoch 1 refused: this rank belongs to epoch 0"):
        group.call("count", key="c")


def test_a_killed_rank_is_named(group: EngineGroup) -> None:
    """SIGKILL (the out-of-memory killer's way) during a command: RankLost, not the deadline."""
    pids = _pids(group)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(RankLost) as caught:
        group.call("ponder_for_ever", key="p")
    lost = caught.value
    assert (lost.rank, lost.reason) == (1, "exited with signal 9 (SIGKILL)")
    assert str(lost.log_file) in str(lost)
    assert "rank 1 of 2" in lost.log_tail
    assert not any(map(alive, pids))
    assert str(pickle.loads(pickle.dumps(lost))) == str(lost)
    with pytest.raises(RankLost, match="earlier"):
        group.call("echo", key="after")


@pytest.mark.parametrize("killed", [True, False])
def test_what_ranks_start_ends_with_them(group: EngineGroup, tmp_path: Path, killed: bool) -> None:
    """Children that got away in every way there is, after `kill -9` of one rank and at the group's own end."""
    folder = tmp_path / "children"
    folder.mkdir()
    group.call("leave_children", key="l", folder=str(folder))
    children = noted(folder)
    assert list(map(alive, children)) == [True] * 6
    if killed:
        os.kill(_pids(group)[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1: exited with signal 9"):
            group.call("ponder_for_ever", key="p")
    else:
        group.close()
    assert not any(map(alive, children))


def test_a_rank_that_leaves_is_named(group: EngineGroup) -> None:
    """An exit in the middle of a command is a loss, with its code."""
    with pytest.raises(RankLost, match="rank 0: exited with code 3"):
        group.call("leave", key="l", rank=0)


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    """A stopped process still exists and is not at its deadline; only its heartbeat tells."""
    with EngineGroup(_spec(tmp_path, heartbeat_timeout_s=2.5)) as group:
        pids = _pids(group)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 0: silent for"):
            group.call("ponder_for_ever", key="p")
        assert not any(map(alive, pids))


def test_a_rank_that_holds_its_interpreter_lock_is_not_silent(tmp_path: Path) -> None:
    """As a library does that compiles, captures or saves: no Python thread of that process runs meanwhile."""
    with EngineGroup(_spec(tmp_path, heartbeat_timeout_s=1.5)) as group:
        assert [reply["others_ran"] for reply in group.call("hold_the_lock", key="h", seconds=4)] == [False, False]


def test_a_busy_rank_is_not_silent(tmp_path: Path) -> None:
    """Negative control of the heartbeat: ranks that work for longer than it, and idle flows, are let be."""
    with EngineGroup(_spec(tmp_path, heartbeat_timeout_s=2.0)) as group:
        group.wait_ready()
        time.sleep(2.1)
        with pytest.raises(RankLost, match="no reply to 'ponder_for_ever' within 2.5 s"):
            group.call("ponder_for_ever", key="p", timeout_s=2.5)


def test_a_missed_deadline_shows_the_stacks(group: EngineGroup) -> None:
    """The message names the function in which every rank is stuck."""
    pids = _pids(group)
    with pytest.raises(RankLost, match=r"no reply to 'ponder_for_ever' within 0.5 s \(nor from rank 1\)") as caught:
        group.call("ponder_for_ever", key="p", timeout_s=0.5)
    assert caught.value.stacks.count("in ponder_for_ever") == 2
    assert caught.value.stacks in str(caught.value)
    assert not any(map(alive, pids))


# ---- start ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_be_built_fails_the_start(tmp_path: Path) -> None:
    """The reason is the worker's own traceback, not a deadline."""
    with (
        EngineGroup(_spec(tmp_path, worker=f"{__name__}:UnbuildableWorker")) as group,
        pytest.raises(EngineError) as caught,
    ):
        group.wait_ready()
    assert caught.value.command == "start"
    assert "OSError: no weights here" in caught.value.remote_traceback


def test_a_worker_that_cannot_be_imported_fails_the_start(tmp_path: Path) -> None:
    """So is the reason of a missing module."""
    group = EngineGroup(_spec(tmp_path, worker="no_such_module:Worker"))
    with group, pytest.raises(EngineError, match="No module named 'no_such_module'"):
        group.wait_ready()


def test_a_late_rank_is_named(tmp_path: Path) -> None:
    """The start's deadline says who is late and how far it got."""
    group = EngineGroup(_spec(tmp_path, worker=f"{__name__}:SlowWorker", start_timeout_s=3.0))
    with group, pytest.raises(RankLost, match="within 3 s: rank 1 was still building its worker") as caught:
        group.wait_ready()
    assert caught.value.rank == 1
    assert "in ponder_for_ever" in caught.value.stacks


def test_a_group_has_one_kind_of_device(tmp_path: Path) -> None:
    """Mixed and empty groups are refused before anything starts."""
    for devices in ((), (RankDevice(0), RankDevice(None))):
        with pytest.raises(ValueError, match="needs devices"):
            _spec(tmp_path, devices=devices)


def test_a_long_log_is_rotated_at_start(tmp_path: Path) -> None:
    """Appending for ever would fill the disk; the old log stays next to the new one."""
    old = tmp_path / "main-rank0.log"
    with old.open("wb") as log:
        log.truncate(ROTATE_ABOVE_BYTES + 1)
    (tmp_path / "main-rank1.log").write_text("short, kept\n")
    with EngineGroup(_spec(tmp_path)) as group:
        group.wait_ready()
    assert (tmp_path / "main-rank0.log.1").stat().st_size == ROTATE_ABOVE_BYTES + 1
    assert old.stat().st_size < ROTATE_ABOVE_BYTES
    assert (tmp_path / "main-rank1.log").read_text().startswith("short, kept\n")


# ---- the end --------------------------------------------------------------------------------------------------------


def test_close_is_polite_and_complete(group: EngineGroup, tmp_path: Path) -> None:
    """Workers are closed, processes are reaped, a second close does nothing and later calls are refused.

    What a worker said is in its log, and libraries are not taken apart: their exit handlers would take seconds.
    """
    pids = _pids(group)
    assert all(map(alive, pids))
    group.close()
    group.close()
    assert not any(map(psutil.pid_exists, pids))
    for rank in range(2):
        log = (tmp_path / f"main-rank{rank}.log").read_text()
        assert "closed in order" in log
        assert "taken apart" not in log
    with pytest.raises(RuntimeError, match="has ended"):
        group.call("echo", key="after")


def test_close_interrupts_a_call(group: EngineGroup) -> None:
    """A call in another thread cannot keep a group, or the flow, from ending."""
    pids = _pids(group)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(group.call, "ponder_for_ever", key="p")
        assert not came_true(stuck.done, within_s=0.5)
        group.close()
        with pytest.raises(RuntimeError, match="closed during 'ponder_for_ever'"):
            stuck.result(10)
    assert not any(map(alive, pids))


def test_ctrl_c_during_a_call_leaves_no_rank(group: EngineGroup) -> None:
    """Half a command is never left behind: the interrupt passes through, the ranks do not survive it."""
    pids = _pids(group)
    # A shell's background job starts with Ctrl-C ignored; this test must not depend on how it was started.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            group.call("ponder_for_ever", key="p")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(map(alive, pids))


def test_a_signal_handler_may_close(group: EngineGroup) -> None:
    """A handler runs inside the call that it interrupts: it must neither deadlock nor pull the socket from under it."""
    pids = _pids(group)
    before = signal.signal(signal.SIGUSR2, lambda *_: group.close())
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(RuntimeError, match="closed during 'ponder_for_ever'"):
            group.call("ponder_for_ever", key="p")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not any(map(alive, pids))


def test_close_ends_a_stopped_rank(group: EngineGroup) -> None:
    """A rank that reacts to nothing is killed."""
    pids = _pids(group)
    os.kill(pids[1], signal.SIGSTOP)
    group.close(grace_s=0.2)
    assert not any(map(psutil.pid_exists, pids))


_FLOW = """
import sys, threading, time
from pathlib import Path
from tests.engines.groups.test_group import EngineGroup, _pids, _spec

def start():
    global group
    group = EngineGroup(_spec(Path(sys.argv[1])))
    print(*_pids(group), flush=True)
    time.sleep(float(sys.argv[3]))

thread = threading.Thread(target=start)
start() if sys.argv[2] == "main" else (thread.start(), thread.join())
"""


@pytest.mark.parametrize(("spawner", "how"), [("main", "SIGKILL"), ("pool", "SIGKILL"), ("main", "return")])
def test_no_rank_outlives_its_flow(spawner: str, how: str, tmp_path: Path) -> None:
    """Whether the flow's process is killed or just ends without closing, and whichever thread spawned the ranks."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", _FLOW, str(tmp_path), spawner, "0" if how == "return" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as flow:
        assert flow.stdout is not None
        pids = [int(pid) for pid in flow.stdout.readline().split()]
        assert len(pids) == 2
        if how == "SIGKILL":
            assert all(map(alive, pids))
            flow.kill()
    assert came_true(lambda: not any(map(alive, pids)), 10)
