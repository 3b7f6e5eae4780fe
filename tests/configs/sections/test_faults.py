"""Faults that could never be met, or not in the way that is asked for, are refused with the reason."""

from __future__ import annotations

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig

IN_REWARD = {"name": "grpo", "kl": {"place": "reward", "coefficient": 0.05}}
IN_LOSS = {"name": "grpo", "mini_batches": 1, "kl": {"place": "loss", "coefficient": 0.05}}


def config(**changes: object) -> TrainConfig:
    """Return a small configuration."""
    base = {"data": {"train": "p.jsonl"}, "model": {"path": "m"}, "reward": {"function": "r:f"}}
    return config_from_mapping(base | changes, "a test")


def test_by_default_a_gradient_may_be_odd_twice_in_a_row_and_nothing_else_is_looked_at() -> None:
    faults = config().faults
    assert (faults.gradient, faults.stops_at) == ("skip", 3)
    assert (faults.kl, faults.update_kl, faults.entropy, faults.reward) == (None, None, None, None)
    assert config(faults={"gradient": "stop"}).faults.stops_at == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"faults": {"kl": {"limit": 1}}}, "'faults.kl' has no effect without 'algorithm.kl'"),
        (
            {"algorithm": IN_LOSS, "faults": {"kl": {"limit": 1, "action": "skip"}}},
            "skip needs a KL that is known before",
        ),
        ({"algorithm": {"mini_batches": 1}, "faults": {"update_kl": {"limit": 1}}}, "'faults.update_kl' has no effect"),
        ({"checkpoint": {"every": 0}, "faults": {"entropy": {"limit": 1, "action": "rollback"}}}, "needs checkpoints"),
        ({"faults": {"entropy": {"limit": 1, "action": "skip"}}}, "faults.entropy.action"),
        ({"faults": {"reward": {"fall": 1, "action": "rollback"}}}, "faults.reward.action"),
        ({"faults": {"reward": {"fall": 0}}}, "faults.reward.fall"),
        (
            {
                "algorithm": {**IN_LOSS, "kl": {"place": "loss", "refresh_every": 2}},
                "faults": {"kl": {"limit": 1, "action": "rollback"}},
            },
            "does not go with 'algorithm.kl.refresh_every'",
        ),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(**changes)


def test_the_kl_is_known_before_the_update_where_a_pass_gives_both_log_probs() -> None:
    """In the reward always; in the loss with several steps, but not over the whole vocabulary."""
    skip = {"kl": {"limit": 1, "action": "skip"}}
    assert config(algorithm=IN_REWARD, faults=skip).algorithm.kl_before_update
    assert config(algorithm={**IN_LOSS, "mini_batches": 2}, faults=skip).algorithm.kl_before_update
    full = {**IN_LOSS, "mini_batches": 2, "kl": {"place": "loss", "estimator": "full", "coefficient": 0.05}}
    assert not config(algorithm=full).algorithm.kl_before_update
    assert not config().algorithm.kl_before_update
