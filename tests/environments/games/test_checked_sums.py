"""The solver and the checker: who sees what, and what each is paid; the warm-up's games are games of these rules."""

from __future__ import annotations

import pytest

from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems
from penstock.environments.games.checked_sums import CheckedSums

ROW = {"prompt": "58+67=", "answer": "125"}


def played(*turns: str, tries: int = 2) -> tuple[list[tuple[str | None, str | None]], dict[str, object]]:
    """Return whom the game showed what, and what it paid in the end."""
    game = CheckedSums(tries, noise=0.0)
    steps = [game.reset(ROW, 0), *map(game.step, turns)]
    assert [step.done for step in steps] == [False] * len(turns) + [True]
    return [(step.agent, step.observation) for step in steps[:-1]], dict(steps[-1].rewards)


@pytest.mark.parametrize(
    ("turns", "solver", "checker"),
    [
        (("125.", "125y"), 1, 1),
        (("015.", "015y"), 0, 0),
        (("015.", "125n", "125.", "y"), 1, 1),
        (("125.", "n", "125.", "999y"), 1, 0.5),  # of its own sum nothing is asked
        (("015.", "n", "016.", "y"), 0, 0.5),
        (("015.", "125n", "016.", "125n"), 0, 1),
        (("125", "n", "125.", "."), 1, 0.5),  # no full stop; no verdict
    ],
)
def test_each_agent_is_paid_for_its_own_part(turns: tuple[str, ...], solver: float, checker: float) -> None:
    """Control: there are games in which one is paid in full and the other is not."""
    assert played(*turns)[1] == {"solver": solver, "checker": checker}


def test_each_agent_sees_what_the_other_said_and_nothing_of_the_rest() -> None:
    """With a third try, the game goes on."""
    shown, paid = played("1.", "n", "2.", "n", "125.", "y", tries=3)
    assert shown == [
        ("solver", "58+67="),
        ("checker", "(58+67=1.)"),
        ("solver", "n"),
        ("checker", "(58+67=2.)"),
        ("solver", "n"),
        ("checker", "(58+67=125.)"),
    ]
    assert paid == {"solver": 1, "checker": 1}


@pytest.mark.parametrize("mistakes", [0.0, 0.4])
def test_the_teachers_play_by_the_rules(mistakes: float) -> None:
    """As many turns are wrong as asked for, and what stands between them is what a game shows.

    Control: without mistakes everybody is paid in full.
    """
    problems = make_problems(ArithmeticData(checked=True, mistakes=mistakes, sft=400, train=10, heldout=10), seed=0)
    rows = problems["sft"].to_dict("records")
    assert len(rows) == 800
    first_right, verdicts_right = 0, 0
    for solver, checker in zip(rows[::2], rows[1::2], strict=True):
        answer, arrived = (
            f"{solver['answer']}.",
            checker["prompt"].removeprefix(f"({solver['prompt']}").removesuffix(")"),
        )
        first_right += solver["response"][0] == answer
        assert arrived[:-2] == answer[:-2]
        sums, verdicts = zip(*((turn[:-1], turn[-1]) for turn in checker["response"][::2]), strict=True)
        assert {*sums} == {solver["answer"]}
        verdicts_right += verdicts[0] == ("y" if arrived == answer else "n")
        assert len(verdicts) == len(solver["response"][::2]) == 1 + (verdicts[0] == "n")
        assert solver["response"][1::2] == ["n"] * (len(verdicts) - 1)
    assert first_right == verdicts_right == round(400 * (1 - mistakes))


def test_on_a_bad_line_the_last_digit_arrives_as_another() -> None:
    """In half of the games, by their seeds alone; the solver is paid for what it wrote. Control: in the other half."""
    seen, paid = list[str](), list[float]()
    for seed in [*range(200), *range(200)]:
        game = CheckedSums(tries=1)
        game.reset(ROW, seed)
        seen.append(str(game.step("125.").observation))
        paid.append(game.step("125y").rewards["solver"])  # type: ignore[arg-type]
    assert seen[:200] == seen[200:]
    assert 80 < seen[:200].count("(58+67=125.)") < 120
    assert {text[:-3] for text in seen} == {"(58+67=12"} and len({*seen}) == 10
    assert paid == [1.0] * 400
