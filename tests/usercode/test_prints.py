"""What a reward function prints goes to its file, is told of once, and never fills a disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import RewardPool
from penstock.rewards.types import Sample
from penstock.usercode import prints
from penstock.usercode.prints import PrintLog


def _score(pool: RewardPool, *responses: str) -> list[float]:
    return [item.reward for item in pool.score([Sample(text, "0", "", text, {}) for text in responses])]


def _pool(log: Path | None) -> RewardPool:
    return RewardPool(RewardConfig(function="tests.rewards.reward_examples:printing", workers=2), [], log)


def test_prints_are_in_the_file_and_not_on_the_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the way: Python's output, its errors, the descriptor, a child. The file is named once, and not before.

    Control: without a file all of it is on the error output.
    """
    log = tmp_path / "logs" / "reward.log"
    with _pool(log) as pool, caplog.at_level(logging.WARNING):
        assert _score(pool, "silent") == [1.0]
        assert caplog.messages == []
        assert _score(pool, "a", "b") == _score(pool, "c", "d") == [1.0, 1.0]
    lines = log.read_text().splitlines()
    ways = ("printed {} \\ud83d", "said {}", "written {}", "run {}")
    assert sorted(lines) == sorted(way.format(name) for name in "abcd" for way in ways)
    assert caplog.messages == [
        f"reward.function 'tests.rewards.reward_examples:printing' prints; its output is in {log}"
    ]
    assert capfd.readouterr() == ("", "")
    with _pool(None) as pool:
        assert _score(pool, "e") == [1.0]
    assert {"printed e \\ud83d", "said e"} <= set(capfd.readouterr().err.splitlines())


WRITES = """
import os, socket, sys
from penstock.usercode.prints import errors_too
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
os.dup2(theirs.fileno(), 1)
errors_too() if sys.argv[1] == "lines" else os.dup2(1, 2)
print("said", "a", file=sys.stderr)
ours.setblocking(False)
count = 0
while count < 9:
    try:
        ours.recv(99)
    except BlockingIOError:
        break
    count += 1
sys.exit(count)
"""


@pytest.mark.parametrize(("how", "writes"), [("lines", 1), ("words", 4)])
def test_a_line_is_written_at_once(how: str, writes: int) -> None:
    """Also where Python does not buffer: lines of several workers do not mix. Control: as Python has it then."""
    said = subprocess.run([sys.executable, "-c", WRITES, how], env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False)
    assert said.returncode == writes


def test_a_function_that_prints_nothing_leaves_no_file(tmp_path: Path) -> None:
    """The folder of logs holds what somebody may want to read. Control: the test above."""
    log = tmp_path / "logs" / "reward.log"
    with _pool(log) as pool:
        assert _score(pool, "silent") == [1.0]
    assert not log.exists()


def test_a_resumed_training_appends_and_is_told_of_its_own_prints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier attempt printed stays and is no news. Control: one more line is."""
    path = tmp_path / "reward.log"
    path.write_text("earlier\n")
    log = PrintLog(path, "it")
    log.look()
    assert caplog.messages == []
    with path.open("a") as file:
        file.write("now\n")
    log.look()
    log.look()
    assert caplog.messages == [f"it prints; its output is in {path}"]
    assert path.read_text() == "earlier\nnow\n"


def test_a_long_file_is_moved_aside_under_those_who_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the bound is kept, and a worker that has it open goes on in it. Control: a short one stays."""
    monkeypatch.setattr(prints, "LONGEST_BYTES", 10)
    path, log = tmp_path / "reward.log", PrintLog(tmp_path / "reward.log", "it")
    with path.open("a", buffering=1) as worker:
        worker.write("short\n")
        log.look()
        assert path.read_text() == "short\n"
        worker.write("and longer\n")
        log.look()
        worker.write("new\n")
    assert path.read_text() == "new\n"
    assert (tmp_path / "reward.log.1").read_text() == "short\nand longer\n"
