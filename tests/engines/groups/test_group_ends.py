"""An engine group names the rank that fails, however it fails, and never leaves a process behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from penstock.base.errors import UserError
from penstock.engines.groups.group import EngineError, EngineGroup, GroupClosed, OutOfMemory, RankDevice, RankLost
from penstock.engines.groups.processes import ROTATE_ABOVE_BYTES
from tests.engines.groups.small_ranks import pids_of, spec
from tests.processes import alive, noted
from tests.waiting import came_true

# ---- failures -------------------------------------------------------------------------------------------------------


def test_an_exception_names_its_rank_and_ends_the_group(group: EngineGroup) -> None:
    """EngineError carries rank, command and remote traceback, survives pickling, and leaves no process."""
    pids = pids_of(group)
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


def test_a_loss_is_known_without_a_call(group: EngineGroup) -> None:
    """From its host, which looks at its ranks. Control: before there is none, and one that was closed has none."""
    pids = pids_of(group)
    assert group.loss() is None
    os.kill(pids[1], signal.SIGKILL)
    assert came_true(lambda: group.loss() is not None, 20)
    loss = group.loss()
    assert loss is not None and (loss.rank, loss.reason) == (1, "exited with signal 9 (SIGKILL)")
    group.close()
    with pytest.raises(RuntimeError, match="has ended"):
        group.loss()


def test_a_rank_that_stands_still_gives_no_echo(group: EngineGroup) -> None:
    """Though its process is there. Control: it does before and afterwards."""
    assert group.answers(20.0)
    stopped = psutil.Process(pids_of(group)[0])
    stopped.suspend()
    try:
        assert came_true(lambda: not group.answers(0.5), 20), "once what it said before has arrived"
    finally:
        stopped.resume()
    assert group.answers(20.0)


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


def test_a_rank_that_runs_out_of_memory_says_with_which_command(group: EngineGroup) -> None:
    """A loss that the training goes on after. Who asks later is told the same: by the command it goes on."""
    pids = pids_of(group)
    with pytest.raises(OutOfMemory) as caught:
        group.call("run_short", key="s", rank=1)
    lost = caught.value
    assert (lost.group, lost.rank, lost.command) == ("main", 1, "run_short")
    assert lost.reason == "no memory left on its GPU for 'run_short'"
    assert lost.log_tail.endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert str(pickle.loads(pickle.dumps(lost))) == str(lost)
    assert not any(map(alive, pids))
    with pytest.raises(OutOfMemory) as later:
        group.call("echo", key="e")
    assert later.value.args == lost.args and later.value.__cause__ is lost


def test_a_killed_rank_is_named(group: EngineGroup) -> None:
    """SIGKILL (the out-of-memory killer's way) during a command: RankLost, not the deadline."""
    pids = pids_of(group)
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
        os.kill(pids_of(group)[1], signal.SIGKILL)
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
    with EngineGroup(spec(tmp_path, heartbeat_timeout_s=1.5)) as group:
        pids = pids_of(group)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 0: silent for"):
            group.call("ponder_for_ever", key="p")
        assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_rank_that_holds_its_interpreter_lock_is_not_silent(tmp_path: Path) -> None:
    """As a library does that compiles, captures or saves: no Python thread of that process runs meanwhile."""
    with EngineGroup(spec(tmp_path, heartbeat_timeout_s=1.5)) as group:
        assert [reply["others_ran"] for reply in group.call("hold_the_lock", key="h", seconds=4)] == [False, False]


@pytest.mark.slow
def test_a_busy_rank_is_not_silent(tmp_path: Path) -> None:
    """Negative control of the heartbeat: ranks that work for longer than it, and idle flows, are let be."""
    with EngineGroup(spec(tmp_path, heartbeat_timeout_s=2.0)) as group:
        group.wait_ready()
        time.sleep(2.1)
        with pytest.raises(RankLost, match="no reply to 'ponder_for_ever' within 2.5 s"):
            group.call("ponder_for_ever", key="p", timeout_s=2.5)


def test_a_missed_deadline_shows_the_stacks(group: EngineGroup) -> None:
    """The message names the function in which every rank is stuck; those of the flow's threads are known, too."""
    pids = pids_of(group)
    with pytest.raises(RankLost, match=r"no reply to 'ponder_for_ever' within 0.5 s \(nor from rank 1\)") as caught:
        group.call("ponder_for_ever", key="p", timeout_s=0.5)
    assert caught.value.stacks.count("in ponder_for_ever") == 2
    assert caught.value.stacks in str(caught.value)
    assert "thread MainThread:" in caught.value.flow_stacks
    assert "in test_a_missed_deadline_shows_the_stacks" in caught.value.flow_stacks
    assert not any(map(alive, pids))


# ---- start ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_be_built_fails_the_start(tmp_path: Path) -> None:
    """The reason is the worker's own traceback, not a deadline."""
    with (
        EngineGroup(spec(tmp_path, worker="tests.engines.groups.small_ranks:UnbuildableWorker")) as group,
        pytest.raises(EngineError) as caught,
    ):
        group.wait_ready()
    assert caught.value.command == "start"
    assert "OSError: no weights here" in caught.value.remote_traceback


def test_a_worker_that_cannot_be_imported_fails_the_start(tmp_path: Path) -> None:
    """So is the reason of a missing module."""
    group = EngineGroup(spec(tmp_path, worker="no_such_module:Worker"))
    with group, pytest.raises(EngineError, match="No module named 'no_such_module'"):
        group.wait_ready()


def test_a_late_rank_is_named(tmp_path: Path) -> None:
    """The start's deadline says who is late and how far it got."""
    group = EngineGroup(spec(tmp_path, worker="tests.engines.groups.small_ranks:SlowWorker", start_timeout_s=3.0))
    with group, pytest.raises(RankLost, match="within 3 s: rank 1 was still building its worker") as caught:
        group.wait_ready()
    assert caught.value.rank == 1
    assert "in ponder_for_ever" in caught.value.stacks


def test_a_group_has_one_kind_of_device(tmp_path: Path) -> None:
    """Mixed and empty groups are refused before anything starts."""
    for devices in ((), (RankDevice(0), RankDevice(None))):
        with pytest.raises(ValueError, match="needs devices"):
            spec(tmp_path, devices=devices)


def test_a_long_log_is_rotated_at_start(tmp_path: Path) -> None:
    """Appending for ever would fill the disk; the old log stays next to the new one."""
    old = tmp_path / "main-rank0.log"
    with old.open("wb") as log:
        log.truncate(ROTATE_ABOVE_BYTES + 1)
    (tmp_path / "main-rank1.log").write_text("short, kept\n")
    with EngineGroup(spec(tmp_path)) as group:
        group.wait_ready()
    assert (tmp_path / "main-rank0.log.1").stat().st_size == ROTATE_ABOVE_BYTES + 1
    assert old.stat().st_size < ROTATE_ABOVE_BYTES
    assert (tmp_path / "main-rank1.log").read_text().startswith("short, kept\n")


# ---- the end --------------------------------------------------------------------------------------------------------


def test_close_is_polite_and_complete(group: EngineGroup, tmp_path: Path) -> None:
    """Workers are closed, processes are reaped, a second close does nothing and later calls are refused.

    What a worker said is in its log, and libraries are not taken apart: their exit handlers would take seconds.
    """
    pids = pids_of(group)
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
    pids = pids_of(group)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(group.call, "ponder_for_ever", key="p")
        assert not came_true(stuck.done, within_s=0.5)
        group.close()
        with pytest.raises(RuntimeError, match="closed during 'ponder_for_ever'"):
            stuck.result(10)
    assert not any(map(alive, pids))


def test_ctrl_c_during_a_call_leaves_no_rank(group: EngineGroup) -> None:
    """Half a command is never left behind: the interrupt passes through, the ranks do not survive it."""
    pids = pids_of(group)
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
    pids = pids_of(group)
    before = signal.signal(signal.SIGUSR2, lambda *_: group.close())
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(RuntimeError, match="closed during 'ponder_for_ever'"):
            group.call("ponder_for_ever", key="p")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not any(map(alive, pids))
    with pytest.raises(GroupClosed):
        group.call("ponder_for_ever", key="q")


def test_close_ends_a_stopped_rank(group: EngineGroup) -> None:
    """A rank that reacts to nothing is killed."""
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGSTOP)
    group.close(grace_s=0.2)
    assert not any(map(psutil.pid_exists, pids))


_FLOW = """
import sys, threading, time
from pathlib import Path
from penstock.engines.groups.group import EngineGroup
from tests.engines.groups.small_ranks import pids_of, spec

def start():
    global group
    group = EngineGroup(spec(Path(sys.argv[1])))
    print(*pids_of(group), flush=True)
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
