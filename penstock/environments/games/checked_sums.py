"""A solver and a checker: the worked example of a game.

The solver is shown `58+67=` and writes `015.`; the checker is shown `(58+67=015.)`, adds for itself and writes `125n`,
whose last letter is its verdict, y or n. After n the solver is shown that and tries again, and the checker sees the new
answer. The game ends with y, or with the verdict on the last try. The solver is paid 1 if its last answer is right, the
checker the share of its verdicts that were.
"""

from __future__ import annotations

from typing import Any

from penstock.environments.calculator import is_right
from penstock.environments.environment import Step

YES, NO = "y", "n"
SOLVER, CHECKER = "solver", "checker"


class CheckedSums:
    """One sum.

    Args:
        tries: answers that the solver has.
    """

    agents = (SOLVER, CHECKER)
    stop = (".", YES, NO)

    def __init__(self, tries: int = 2) -> None:
        self.tries = tries

    def reset(self, row: dict[str, Any], seed: int) -> Step:
        """Let the solver begin."""
        self.prompt, self.answer = str(row["prompt"]), str(row["answer"])
        self.right: list[bool] = []  # the solver's answers
        self.verdicts: list[bool] = []  # whether these were right themselves
        self.turn = SOLVER
        return Step(agent=SOLVER, observation=self.prompt)

    def step(self, text: str) -> Step:
        """Show the answer to the checker, or the verdict to the solver."""
        if self.turn == SOLVER:
            self.right.append(is_right(text, self.answer))
            self.turn = CHECKER
            return Step(agent=CHECKER, observation=shown_to_checker(self.prompt, text))
        verdict = text[-1:]
        self.verdicts.append(verdict == (YES if self.right[-1] else NO))
        if verdict != NO or len(self.right) == self.tries:
            earned = {SOLVER: float(self.right[-1]), CHECKER: sum(self.verdicts) / len(self.verdicts)}
            return Step(done=True, rewards=earned)
        self.turn = SOLVER
        return Step(agent=SOLVER, observation=NO)


def shown_to_checker(prompt: str, answer: str) -> str:
    """Return what the checker sees of an answer."""
    return f"({prompt}{answer})"
