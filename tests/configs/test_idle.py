"""What a training is too short for is said, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.configs.idle import idle_settings
from penstock.configs.schema import TrainConfig

LONG: dict[str, Any] = {
    "sft": {"steps": 60, "checkpoint_every": 50, "optimizer": {"learning_rate": {0: 1e-3, 40: 1e-4}}},
    "data": {"arithmetic": {}},
    "evaluate": {"every": 20},
    "checkpoint": {"every": 30},
    "record": {"samples_every": 40},
    "rollout": {"temperature": {0: 1.0, 15: 0.8, 35: 0.6}},
    "algorithm": {"name": "ppo", "kl": {"refresh_every": 40}, "settings": {"gamma": {0: 1.0, 45: 0.9}}},
    "actor": {"optimizer": {"learning_rate": {0: 1e-6, 50: 1e-7}}},
}


def test_what_lies_beyond_the_end_is_said_key_by_key() -> None:
    """Also steps of a schedule, and of the warm-up its own. Control: with more iterations and steps nothing is said."""
    short = {**LONG, "iterations": 19, "sft": {**LONG["sft"], "steps": 40}}
    end = "has no effect: the training has 19 iterations"
    assert idle_settings(TrainConfig.model_validate(short)) == [
        f"'evaluate.every' (20) {end}",
        f"'checkpoint.every' (30) {end}",
        f"'record.samples_every' (40) {end}",
        f"'algorithm.kl.refresh_every' (40) {end}",
        f"'rollout.temperature' (35: 0.6) {end}",
        f"'actor.optimizer.learning_rate' (50: 1e-07) {end}",
        f"'algorithm.settings.gamma' (45: 0.9) {end}",
        "'sft.checkpoint_every' (50) has no effect: the warm-up has 40 steps",
        "'sft.optimizer.learning_rate' (40: 0.0001) has no effect: the warm-up has 40 steps",
    ]
    assert idle_settings(TrainConfig.model_validate({**LONG, "iterations": 50})) == []


@pytest.mark.parametrize("key", ["evaluate", "checkpoint"])
def test_the_last_iteration_is_not_beyond_the_end(key: str) -> None:
    """Every tenth of ten is the last. Control: every eleventh."""
    for every, count in ((10, 0), (11, 1)):
        assert len(idle_settings(TrainConfig.model_validate({"iterations": 10, key: {"every": every}}))) == count


def test_of_defaults_nothing_is_said() -> None:
    """Whoever tries a recipe with two iterations did not ask for a checkpoint every ten."""
    assert idle_settings(TrainConfig.model_validate({"iterations": 2, "sft": {"steps": 3}, "record": {}})) == []
