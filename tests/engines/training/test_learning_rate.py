"""The learning rate follows its shape step by step; hand values, because a shape is easy to get off by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from penstock.configs.sections.optimizer import OptimizerConfig
from penstock.engines.training.trainer import learning_rate_factor


def _factors(total: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(**settings)
    return [learning_rate_factor(step, total, config) for step in range(total + 2)]


def test_without_warm_up_and_decay_the_rate_is_the_peak() -> None:
    """The default changes nothing, at the first step and beyond the last."""
    assert _factors(3) == [1.0] * 5


def test_warm_up_reaches_the_peak_at_its_last_step_and_never_starts_at_zero() -> None:
    """A first step at rate 0 would be a wasted rollout."""
    assert _factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_decay() -> None:
    """From 1 after the warm-up to the floor at total_steps, and no further."""
    assert _factors(4, decay="linear") == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert _factors(4, decay="linear", min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert _factors(6, decay="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_decay() -> None:
    """1, (2 + sqrt 2)/4, 1/2, (2 - sqrt 2)/4, 0 for four steps; the floor scales the same curve."""
    curve = [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0]
    assert _factors(4, decay="cosine") == pytest.approx(curve)
    assert _factors(4, decay="cosine", min_ratio=0.1) == pytest.approx([0.1 + 0.9 * value for value in curve])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_rises_through_the_warm_up_and_falls_after_it(decay: str) -> None:
    """Whatever the lengths: one peak. A warm-up longer than the training only rises."""
    factors = _factors(50, decay=decay, warmup_steps=10, min_ratio=0.1)
    assert all(a < b for a, b in pairwise(factors[:10]))
    assert all(a >= b for a, b in pairwise(factors[10:]))
    assert all(a < b for a, b in pairwise(_factors(5, decay=decay, warmup_steps=20)))
