"""Programs as responses: the problem's tests are the reward, and what a model wrote runs in a sandbox or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.data.rows import to_frame
from penstock.rewards.code import cases_of, passes_tests, program_of
from penstock.rewards.pool import RewardPool
from penstock.rewards.source import check_source
from penstock.rewards.types import Sample
from penstock.usercode.sandbox import obstacle

BOXED = pytest.mark.skipif(bool(obstacle()), reason="no sandbox on this machine")
FUNCTION = "penstock.rewards.code:passes_tests"
ASSERTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
CASES = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0"}, {"input": "5 0", "output": "5"}]
READS = "a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')\n"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (RIGHT, RIGHT),
        (f"Here it is:\n```python\n{RIGHT}```\nDone.", RIGHT),
        (f"```python\n{WRONG}```\nNo, rather:\n```py\n{RIGHT}```\nIt prints\n```text\n5\n```", RIGHT),
        (f"```\n{RIGHT}```", RIGHT),
        ("```python\nunfinished", "```python\nunfinished"),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str) -> None:
    """A response without any is one itself."""
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (RIGHT, 1.0),
        (WRONG, 0.0),
        ("", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        (f"{RIGHT}\nprint('a flood' * 1000)", 1.0),
    ],
)
def test_assertions_are_passed_to_their_end_or_not_at_all(program: str, reward: float) -> None:
    """Whoever leaves before has not passed them."""
    assert passes_tests(program, ASSERTS) == {"reward": reward, "passed": reward}


LISTS = {"inputs": [case["input"] for case in CASES], "outputs": ["5\n", "0", "5"]}


@pytest.mark.parametrize("tests", [CASES, LISTS])
def test_cases_are_read_and_printed(tests: Any) -> None:
    """In both shapes, as a data file gives them; spaces at ends do not count. Controls: right in two cases of three."""
    (tests,) = to_frame(pa.Table.from_pylist([{"tests": tests}]))["tests"]
    assert passes_tests(READS, tests) == {"reward": 1.0, "passed": 1.0}
    once = passes_tests("print(5)", tests)
    assert once == {"reward": 0.0, "passed": pytest.approx(1 / 3)}  # the second is wrong, the third has no turn
    assert passes_tests("print(5)", tests, partial=True) == {
        "reward": pytest.approx(2 / 3),
        "passed": pytest.approx(2 / 3),
    }
    assert passes_tests(f"{READS}raise SystemExit(1)", tests)["passed"] == 0.0


def test_a_program_without_end_takes_no_longer_than_all_runs_may() -> None:
    """Of many cases as well. Control: the time is not up at once."""
    began = time.monotonic()
    assert passes_tests("while True: pass", CASES * 10, seconds=1.0, partial=True)["reward"] == 0.0
    assert 0.9 < time.monotonic() - began < 8.0


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (" ", "no tests"),
        ([], "no cases"),
        (3, "no program, and no cases"),
        ([{"input": "1", "expected": "2"}], "without a text"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ],
)
def test_a_problem_without_tests_is_a_mistake_and_no_wrong_answer(tests: object, said: str) -> None:
    """Control: the cases above."""
    with pytest.raises(ValueError, match=said):
        passes_tests(RIGHT, tests)
    assert len(cases_of(CASES)) == 3


@BOXED
def test_workers_score_programs_in_their_sandbox(tmp_path: Path) -> None:
    """Files of the machine are not there; what kills all that it sees costs its own call. Control: no sandbox."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    looks, kills = f"open({str(secret)!r})\n{RIGHT}", f"import os\nos.kill(-1, 9)\n{RIGHT}"
    assert passes_tests(looks, ASSERTS)["reward"] == 1.0
    config = RewardConfig(function=FUNCTION, sandbox={}, workers=1, timeout_s=30.0, max_failure_share=1.0)
    with RewardPool(config, ["tests"]) as pool:
        programs = enumerate((RIGHT, WRONG, looks, kills, RIGHT))
        scores = pool.score([Sample(str(n), "0", "", text, {"tests": ASSERTS}) for n, text in programs])
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [score.failure is None for score in scores] == [True, True, True, False, True]


def test_without_a_sandbox_it_is_refused() -> None:
    """Before anything starts. Control: another built-in function needs none."""
    with pytest.raises(UserError, match=r"passes_tests' runs what the model writes.*\n.*reward.sandbox=\{\}"):
        check_source(RewardConfig(function=FUNCTION), ["tests"])
    check_source(RewardConfig(function="penstock.rewards.builtin:exact_match"), ["answer"])
    with pytest.raises(UserError, match="tests"):
        check_source(RewardConfig(function=FUNCTION), ["answer"])
