"""Python that a model writes: run within bounds, in a sandbox or not at all, and judged by a problem's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.code import Python
from penstock.environments.environment import ToolCall
from penstock.environments.loading import load_environment, tools_told
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call
from penstock.usercode.sandbox import obstacle
from tests.processes import alive
from tests.waiting import until

BOXED = pytest.mark.skipif(bool(obstacle()), reason="no sandbox on this machine")
RIGHT, WRONG = "def double(x): return 2 * x", "def double(x): return x"


def started(**settings: Any) -> Python:
    problem = Python(**settings)
    problem.reset(tests="assert double(4) == 8")
    return problem


def test_what_is_printed_is_seen_and_files_stay() -> None:
    """Errors as well. Control: another problem's folder is another."""
    problem = started()
    assert problem.run_python("print(6 * 7); open('a', 'w').write('kept')") == "42"
    assert problem.run_python("print(open('a').read())") == "kept"
    assert problem.run_python("x = 1") == "(nothing printed)"
    failed = problem.run_python("1 / 0")
    assert "ZeroDivisionError" in failed and failed.endswith("(exit status 1)")
    assert "FileNotFoundError" in started().run_python("open('a')")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: pass", "ended after 0.5 s"),
        ("import time; time.sleep(60)", "ended after 0.5 s"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('a', 'wb').write(bytes(1 << 25))", "File too large"),
    ],
)
def test_a_run_is_bounded(code: str, said: str) -> None:
    """In time, in memory, and in what it writes. Control: the tests above."""
    assert said in started(seconds=0.5 if "ended" in said else 20.0).run_python(code)


def test_a_flood_is_shown_by_its_ends() -> None:
    text = started(shown=20).run_python("print('a' * 500 + 'b' * 500)")
    assert text == f"{'a' * 10}\n[... 981 characters ...]\n{'b' * 9}"


def test_what_a_run_started_ends_with_it() -> None:
    """Also in the background. Control: it had begun."""
    run = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    number = int(started(seconds=20.0).run_python(f"import subprocess, sys; print({run}.pid)"))
    until(lambda: not alive(number), 10, "what was killed has ended")


def test_the_tests_of_the_problem_are_the_reward() -> None:
    """Of the last program, in an empty folder; without any there is no reward of its own."""
    problem = started(tests="tests")
    assert problem.get_reward() == 0.0
    problem.run_python(WRONG)
    assert problem.get_reward() == 0.0
    problem.run_python(RIGHT)
    assert problem.get_reward() == 1.0
    for way_out in ("raise SystemExit(0)", "import os; os._exit(0)", "print('passed'); exit()"):
        problem.run_python(way_out)
        assert problem.get_reward() == 0.0
    assert started().get_reward() is None


def config_of(**sections: Any) -> EnvironmentConfig:
    settings = {"seconds": 10.0, "tests": "tests"}
    return EnvironmentConfig(
        type="penstock.environments.code:Python", settings=settings, workers=1, timeout_s=60.0, **sections
    )


def test_without_a_sandbox_it_is_refused() -> None:
    with pytest.raises(UserError, match="runs what the model writes, and there is no sandbox"):
        load_environment(config_of())
    told = tools_told(config_of(sandbox={}))
    assert told is not None and [tool["function"]["name"] for tool in told] == ["run_python"]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with closing(EnvironmentPool(config_of(sandbox={"memory_gib": 2.0}))) as opened:
        yield opened


def said(pool: EnvironmentPool, code: str) -> str:
    pool.ask([Call("1", row={"tests": "assert double(4) == 8"})])
    assert pool.replies(1)["1"].failure is None
    pool.ask([Call("1", tool_calls=[ToolCall("run_python", {"code": code})])])
    reply = pool.replies(1)["1"]
    assert reply.failure is None
    return reply.messages[0]["content"]


@BOXED
def test_in_the_sandbox_it_sees_no_network_and_writes_no_files(pool: EnvironmentPool) -> None:
    """But in its folder; and the tests judge there as well."""
    assert "Network is unreachable" in said(pool, "import socket; socket.create_connection(('10.1.2.3', 80), 2)")
    assert "Read-only file system" in said(pool, f"open({sys.prefix!r} + '/written', 'w')")
    assert said(pool, f"open('a', 'w'); print('written')\n{RIGHT}") == "written"
    pool.ask([Call("1", text="Done.")])
    reply = pool.replies(1)["1"]
    assert (reply.done, reply.reward) == (True, 1.0)
