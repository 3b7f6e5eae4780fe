"""The calculator calculates, and nothing else."""

from __future__ import annotations

import pytest

from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems
from penstock.environments.calculator import ERROR, Calculator, calculated
from penstock.environments.environment import Step


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1234+5678", "=6912 "),
        ("0012+0345", "=357 "),
        ("2*(3-10)", "=-14 "),
        ("-(4)", "=-4 "),
        ("10/4", "=2.5 "),
        ("1/3", "=0.3333333333 "),
        ("0.05+1", "=1.05 "),
        ("1/0", ERROR),
        ("9**9**9", ERROR),
        ("1e999", ERROR),
        ("1+", ERROR),
        ("", ERROR),
        ("__import__('os').getcwd()", ERROR),
        ("a", ERROR),
        ("True+1", ERROR),
        ("'a'*9", ERROR),
        ("1+" * 40 + "1", ERROR),
        ("(" * 30 + "1" + ")" * 30, "=1 "),
    ],
)
def test_arithmetic_and_nothing_else(expression: str, shown: str) -> None:
    """Numbers, + - * /, signs and brackets; everything else is an error, also what Python would run."""
    assert calculated(expression) == shown


def test_an_episode() -> None:
    """A call is answered, a turn without one is the answer; a call has to end the turn."""
    game = Calculator(penalty=0.25)
    game.reset({"answer": "06912"}, seed=0)
    assert game.step("it is [1234+5678]") == Step("=6912 ")
    assert game.step("[1234+]") == Step(ERROR, reward=-0.25)
    for text, reward in [("6912.", 1.0), ("06912.", 1.0), ("6912", 0.0), ("6913.", 0.0), ("[1+1] 6912.", 0.0)]:
        assert game.step(text) == Step(done=True, reward=reward)
    assert game.step("6_912.").reward == 0.0


def test_demonstrations_hold_what_the_calculator_says() -> None:
    """In exactly the share asked for; the teacher's last turn earns the reward, its call the observation."""
    frame = make_problems(ArithmeticData(digits=3, calls=0.25, sft=40, train=8, heldout=8), 0)["sft"]
    called = [row for row in frame.itertuples() if len(row.response) == 3]
    assert len(called) == 10
    for row in frame.itertuples():
        game = Calculator()
        game.reset({"answer": row.answer}, 0)
        *before, last = row.response
        if before:
            assert game.step(before[0]).observation == before[1]
        assert game.step(last) == Step(done=True, reward=1.0)
