"""The one exception for a user's mistake: it carries what is wrong and what to do, and never a traceback.

The command line prints it and leaves with exit code 2; a Prefect run fails with the same text. A run that stops itself
because its rollouts would be wrong says so likewise, with exit code 1, and so does a sweep whose trainings failed.
Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """Something only the user can put right.

    Args:
        problem: what is wrong and where, in one sentence.
        remedy: what to do about it, in one sentence.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        return type(self), (self.problem, self.remedy)


class RewardTimeout(UserError):
    """Rewards have not come in time, of more samples than a training goes on without."""


class NumericalFault(UserError):
    """A training's numbers are beyond what it should learn from; what it does then is its configuration's `faults`."""


class GradientNotFinite(NumericalFault):
    """A gradient is NaN or infinite."""


class KlExploded(NumericalFault):
    """The policy has run away from its reference, or from itself within the updates of an iteration."""


class EntropyCollapsed(NumericalFault):
    """The policy has become nearly deterministic."""


class RewardCollapsed(NumericalFault):
    """The mean reward has fallen far below what it was."""


NUMERICAL_FAULTS = {kind.__name__: kind for kind in (GradientNotFinite, KlExploded, EntropyCollapsed, RewardCollapsed)}


class FailedInWords(RuntimeError):
    """A failure whose message is all there is to say: no traceback, and exit code 1, for no input was wrong."""


class LogprobGapError(FailedInWords):
    """vLLM and the actor, with the same weights, give the same tokens log-probs that differ by more than rounding.

    Args:
        problem: the figures, in one sentence.
        remedy: what to do about it, in one sentence.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[type[LogprobGapError], tuple[str, str]]:
        return type(self), (self.problem, self.remedy)
