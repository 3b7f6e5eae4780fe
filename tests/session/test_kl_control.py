"""The KL coefficient follows the divergence of the iteration that just ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session.session import Training
from penstock.session.settings import next_kl_coefficient, settings_at
from penstock.state.manifest import Progress

MakeTraining = Callable[[TrainConfig], Training]
BATCH = {"prompts": 10, "samples": 5}  # 50 samples


@pytest.mark.parametrize(("observed", "expected"), [(0.4, 0.11), (0.0, 0.09), (0.1, 0.1), (0.105, 0.1025)])
def test_an_adaptive_coefficient_moves_towards_the_target(
    training_with: MakeTraining, observed: float, expected: float
) -> None:
    """Up and down by at most 20 % x samples / horizon, here 10 %; at the target it stays."""
    kl = {"coefficient": 0.1, "target": 0.1, "horizon": 100}
    training = training_with(config_from_mapping({"algorithm": {"kl": kl}, "rollout": BATCH}, "test"))
    metrics = {"actor/kl": observed}
    settings = settings_at(training.config, 1, Progress())
    assert next_kl_coefficient(training, settings, metrics) == pytest.approx(expected)
    assert metrics["kl/coefficient"] == 0.1, "recorded is the coefficient that was used"


def test_an_adaptive_coefficient_stays_below_its_ceiling(training_with: MakeTraining) -> None:
    """Of 0.11, where it would go without one."""
    kl = {"coefficient": 0.1, "target": 0.1, "horizon": 100, "ceiling": 0.105}
    training = training_with(config_from_mapping({"algorithm": {"kl": kl}, "rollout": BATCH}, "test"))
    settings = settings_at(training.config, 1, Progress())
    assert next_kl_coefficient(training, settings, {"actor/kl": 0.4}) == pytest.approx(0.105)


@pytest.mark.parametrize("metrics", [{"actor/kl": math.nan}, {"actor/kl": math.inf}, {}])
def test_an_adaptive_coefficient_stays_where_the_divergence_says_nothing(
    training_with: MakeTraining, metrics: dict[str, float]
) -> None:
    """A skipped step must not end the run, nor a missing figure. Control: 0.4, in the first test."""
    kl = {"coefficient": 0.1, "target": 0.1, "horizon": 100}
    training = training_with(config_from_mapping({"algorithm": {"kl": kl}, "rollout": BATCH}, "test"))
    assert next_kl_coefficient(training, settings_at(training.config, 1, Progress()), metrics) == 0.1


@pytest.mark.parametrize(("kl", "recorded"), [(None, {}), ({"coefficient": 0.1}, {"kl/coefficient": 0.1})])
def test_without_a_target_there_is_no_state(
    training_with: MakeTraining, kl: dict[str, Any] | None, recorded: dict[str, float]
) -> None:
    """A fixed coefficient is recorded, and none is not."""
    training = training_with(config_from_mapping({"algorithm": {"kl": kl}}, "test"))
    metrics: dict[str, float] = {}
    settings = settings_at(training.config, 1, Progress())
    assert next_kl_coefficient(training, settings, metrics) is None
    assert metrics == recorded
