"""Intervals: those of a slow loop, as wide as theory says, and narrower only with more prompts."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from penstock.evaluators import bootstrap
from penstock.evaluators.bootstrap import RESAMPLES, intervals, with_intervals


def test_intervals_are_those_of_a_loop_over_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden by pure Python over the same draws; cutting the resamples into portions changes nothing."""
    values_MP = np.random.default_rng(5).normal(size=(2, 7))
    generator = np.random.default_rng(bootstrap.SEED)
    draws = [generator.integers(7, size=7).tolist() for _ in range(RESAMPLES)]
    for row, (low, high) in zip(values_MP.tolist(), zip(*intervals(values_MP), strict=True), strict=True):
        means = sorted(statistics.fmean(row[index] for index in draw) for draw in draws)
        for share, found in ((0.025, low), (0.975, high)):
            place = share * (RESAMPLES - 1)
            below, above = means[math.floor(place)], means[math.ceil(place)]
            assert found == pytest.approx(below + (place - math.floor(place)) * (above - below))
    whole = intervals(values_MP)
    monkeypatch.setattr(bootstrap, "_DRAWS_AT_ONCE", 7 * 64)
    np.testing.assert_array_equal(intervals(values_MP), whole)


@pytest.mark.parametrize("prompts", [100, 1600])
def test_the_width_is_that_of_the_normal_approximation(prompts: int) -> None:
    """Of a share of one half over P prompts: 2 x 1.96 x sqrt(1 / (4 P))."""
    (low,), (high,) = intervals(np.arange(prompts)[None] % 2.0)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / prompts), rel=0.1)
    assert low < 0.5 < high


def test_prompts_are_resampled_not_responses() -> None:
    """Responses that only repeat each other bring no certainty: n copies of each leave the interval as it is."""
    values_P = np.random.default_rng(1).normal(size=50)
    once = with_intervals({"x": values_P})
    copied = with_intervals({"x": np.repeat(values_P[:, None], 8, axis=1).mean(axis=1)})
    assert copied == pytest.approx(once)
    as_responses = with_intervals({"x": np.repeat(values_P, 8)})
    assert as_responses["x/high"] - as_responses["x/low"] < 0.6 * (once["x/high"] - once["x/low"])


def test_one_prompt_and_equal_values_have_no_width() -> None:
    """Nothing varies, so nothing is drawn apart."""
    assert with_intervals({"x": np.ones(1)}) == {"x": 1.0, "x/low": 1.0, "x/high": 1.0}
    assert with_intervals({"x": np.full(9, 0.25)}) == {"x": 0.25, "x/low": 0.25, "x/high": 0.25}
