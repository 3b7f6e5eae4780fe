"""What chance explains, against numbers computed by hand and by another way; each with a control."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from penstock.reports.comparing.statistics import difference, interval

A = {"0": [0.60], "1": [0.70], "2": [0.80]}
B = {"0": [0.57], "1": [0.66], "2": [0.78]}


def test_an_interval_holds_the_mean_nineteen_times_of_twenty() -> None:
    """Of five values each. Control: twice the standard error alone does so less often."""
    chance = random.Random(0)
    samples = [[chance.gauss(0.5, 0.02) for _ in range(5)] for _ in range(4000)]
    held = [low < 0.5 < high for low, high in map(interval, samples)]
    assert statistics.mean(held) == pytest.approx(0.95, abs=0.01)
    narrow = [abs(statistics.mean(values) - 0.5) < 2 * statistics.stdev(values) / 5**0.5 for values in samples]
    assert statistics.mean(narrow) < 0.91


def test_an_interval_is_students() -> None:
    """Of 1, 2, 3: mean 2, deviation 1, t(2) = 4.3027, so 2 ± 4.3027 / √3. Control: the normal's 1.96 is narrower."""
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), rel=1e-5)
    assert high - 2 > 1.96 / math.sqrt(3)


def test_groups_of_the_same_seeds_are_compared_seed_by_seed() -> None:
    """By hand: differences 0.03, 0.04, 0.02, mean 0.03, deviation 0.01, t = 0.03 / (0.01 / √3) = 5.196, p of t(2).

    Control: taken as independent the same values differ by nothing that chance would not explain.
    """
    found = difference(A, B)
    assert found is not None
    assert found.mean == pytest.approx(0.03)
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.03 - reach, 0.03 + reach), rel=1e-5)
    assert found.p == pytest.approx(2 * stats.t.sf(5.19615, 2), rel=1e-4)
    assert found.p == pytest.approx(0.0351, abs=1e-4)
    assert found.significant
    assert found.test == "paired t-test, 3 seeds"
    independent = difference(A, {"3": [0.57], "4": [0.66], "5": [0.78]})
    assert independent is not None and not independent.significant


def test_the_order_of_seeds_does_not_matter() -> None:
    """Runs end in any order. Control: values given to other seeds make another test."""
    turned = difference(A, {seed: B[seed] for seed in ("2", "0", "1")})
    assert turned == difference(A, B)
    mixed = difference(A, {"0": [0.78], "1": [0.57], "2": [0.66]})
    assert mixed is not None and mixed.p > 0.5


@pytest.mark.parametrize(
    "others", [{"0": [0.57], "1": [0.66]}, {"5": [0.57], "6": [0.66]}, {"0": [0.57, 0.66], "1": [0.6], "2": [0.7]}]
)
def test_other_seeds_are_compared_by_welch(others: dict[str, list[float]]) -> None:
    """By its formula: variances of their own, degrees of freedom of Welch and Satterthwaite.

    Also where a seed was trained twice. Control: the paired test above.
    """
    found = difference(A, others)
    assert found is not None
    one, two = [np.array([value for runs in group.values() for value in runs]) for group in (A, others)]
    errors = one.var(ddof=1) / len(one), two.var(ddof=1) / len(two)
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / (len(one) - 1) + errors[1] ** 2 / (len(two) - 1))
    gap = float(one.mean() - two.mean())
    assert found.p == pytest.approx(2 * stats.t.sf(abs(gap) / math.sqrt(sum(errors)), freedom))
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert (found.mean, found.low, found.high) == pytest.approx((gap, gap - reach, gap + reach))
    assert found.test == f"Welch's t-test, 3 and {len(two)} runs"


def test_single_runs_say_nothing_of_chance() -> None:
    """Neither does a group without the figure. Control: two runs do."""
    assert difference(A, {"0": [0.5]}) is None
    assert difference({}, A) is None
    assert difference({"0": [0.1], "1": [0.2]}, A) is not None


def test_equal_values_are_no_difference() -> None:
    """There is no p value where nothing varies. Control: a difference that is the same in all seeds is certain."""
    found = difference(A, A)
    assert found is not None and math.isnan(found.p) and not found.significant
    shifted = difference({"0": [1.0], "1": [2.0]}, {"0": [0.5], "1": [1.5]})
    assert shifted is not None and shifted.p == 0.0 and shifted.significant


def test_one_difference_in_twenty_is_found_where_there_is_none() -> None:
    """Of either test, over many made-up pairs of groups. Control: where there is one, it is found far more often."""
    chance = random.Random(1)

    def group(seeds: range, mean: float) -> dict[str, list[float]]:
        return {str(seed): [chance.gauss(mean, 0.02)] for seed in seeds}

    def found(other: range, mean: float) -> float:
        tested = [difference(group(range(5), 0.5), group(other, mean)) for _ in range(800)]
        return statistics.mean(item is not None and item.significant for item in tested)

    for other in (range(5), range(5, 10)):
        assert found(other, 0.5) == pytest.approx(0.05, abs=0.02)
        assert found(other, 0.54) > 0.5
