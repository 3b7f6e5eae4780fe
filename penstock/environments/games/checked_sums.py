"""A solver and a checker: the worked example of a game.

The solver is shown `58+67=` and writes `125.`. The line to the checker is bad: in half of the cases the last digit
arrives as another. So the checker is shown `(58+67=129.)`, adds for itself and writes `125n`, whose last letter is its
verdict on what it sees, y or n. After n the solver is shown that and writes again. The game ends with y, or with the
verdict on the last try. The solver is paid 1 if its last answer is right, the checker the share of its verdicts that
were.
"""

from __future__ import annotations

import random
from typing import Any

from penstock.environments.calculator import is_right
from penstock.environments.environment import Step

YES, NO = "y", "n"
SOLVER, CHECKER = "solver", "checker"


class CheckedSums:
    """One sum.

    Args:
        tries: answers that the solver has.
        noise: how often the last digit arrives as another.
    """

    agents = (SOLVER, CHECKER)
    stop = (".", YES, NO)

    def __init__(self, tries: int = 2, noise: float = 0.5) -> None:
        self.tries, self.noise = tries, noise

    def reset(self, row: dict[str, Any], seed: int) -> Step:
        """Let the solver begin."""
        self.prompt, self.answer = str(row["prompt"]), str(row["answer"])
        self.line = random.Random(seed)
        self.right: list[bool] = []  # what the solver wrote
        self.arrived_right: list[bool] = []
        self.verdicts: list[bool] = []  # whether these were right
        return Step(agent=SOLVER, observation=self.prompt)

    def step(self, text: str) -> Step:
        """Show the checker what arrives of an answer, or the solver the verdict."""
        if len(self.right) == len(self.verdicts):
            arrived = self._sent(text)
            self.right.append(is_right(text, self.answer))
            self.arrived_right.append(is_right(arrived, self.answer))
            return Step(agent=CHECKER, observation=f"({self.prompt}{arrived})")
        verdict = text[-1:]
        self.verdicts.append(verdict == (YES if self.arrived_right[-1] else NO))
        if verdict == NO and len(self.right) < self.tries:
            return Step(agent=SOLVER, observation=NO)
        earned = {SOLVER: float(self.right[-1]), CHECKER: sum(self.verdicts) / len(self.verdicts)}
        return Step(done=True, rewards=earned)

    def _sent(self, text: str) -> str:
        places = [place for place, letter in enumerate(text) if letter in "0123456789"]
        if not places or self.line.random() >= self.noise:
            return text
        last = places[-1]
        digit = (int(text[last]) + 1 + int(9 * self.line.random())) % 10
        return f"{text[:last]}{digit}{text[last + 1 :]}"
