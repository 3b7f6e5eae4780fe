"""What chance explains: intervals of a mean over seeds, and of the difference between two groups of runs.

Both are Student's: seeds are few, and their results near enough to normal. Left out: corrections for many comparisons,
and intervals over prompts, which evaluators compute (penstock/evaluators/bootstrap.py).
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95
SIGNIFICANT = 1 - CONFIDENCE


@dataclass(frozen=True)
class Difference:
    """By how much the mean of one group is above that of another, and what chance explains.

    Attributes:
        low, high: ends of the 95 % interval.
        p: how probable a difference at least as large would be if there were none; NaN where all values are equal.
        test: its name, with how many values.
    """

    mean: float
    low: float
    high: float
    p: float
    test: str

    @property
    def significant(self) -> bool:
        """Whether chance explains it less than once in twenty times."""
        return self.p < SIGNIFICANT


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two values: mean ± t(n - 1) * s / sqrt(n)."""
    mean, reach = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach *= float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean - reach, mean + reach


def difference(values: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> Difference | None:
    """Return by how much `values` are above `others`; None where one group has a single value.

    Where both have the same seeds, one run each, the runs of a seed are compared with each other: what the seed does to
    both is no part of the difference then. Else the groups are taken as independent, of variances of their own (Welch).

    Args:
        values: of the runs of one group, by their seed.
        others: likewise, of the other group.
    """
    mine, theirs = _all(values), _all(others)
    if min(len(mine), len(theirs)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are all equal: p is NaN or 0 then
        if values.keys() == others.keys() and all(len(runs) == 1 for runs in (*values.values(), *others.values())):
            found = stats.ttest_rel(mine, [others[seed][0] for seed in values])
            test = f"paired t-test, {len(mine)} seeds"
        else:
            found = stats.ttest_ind(mine, theirs, equal_var=False)
            test = f"Welch's t-test, {len(mine)} and {len(theirs)} runs"
        low, high = found.confidence_interval(CONFIDENCE)
    return Difference(
        statistics.mean(mine) - statistics.mean(theirs), float(low), float(high), float(found.pvalue), test
    )


def _all(values: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for runs in values.values() for value in runs]
