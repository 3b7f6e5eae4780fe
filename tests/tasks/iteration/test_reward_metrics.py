"""The figures and columns of an iteration's rewards."""

from __future__ import annotations

import math

import pytest

from penstock.rewards.pool import Score
from penstock.tasks.iteration.reward import reward_columns, reward_metrics

SCORES = [
    Score(1.0, {"format": 1.0, "answer": 0.0}, None),
    Score(3.0, {"format": 2.0}, None),
    Score(-1.0, {}, "ValueError: no number"),
]


def test_metrics_count_every_row_and_parts_where_they_exist() -> None:
    """A row without a part does not count as a zero of it."""
    assert reward_metrics(SCORES) == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(8 / 3)),
        "reward/min": -1.0,
        "reward/max": 3.0,
        "reward/failures": 1.0,
        "reward/format_mean": 1.5,
        "reward/answer_mean": 0.0,
    }


def test_columns_have_one_entry_per_row() -> None:
    """Rewards and failures in order; a part that a row lacks is no number."""
    columns = reward_columns(SCORES)
    assert set(columns) == {"reward", "reward_failure", "reward/format", "reward/answer"}
    assert columns["reward"].tolist() == [1.0, 3.0, -1.0]
    assert columns["reward_failure"] == [None, None, "ValueError: no number"]
    assert columns["reward/format"].tolist()[:2] == [1.0, 2.0]
    assert math.isnan(columns["reward/format"][2])
