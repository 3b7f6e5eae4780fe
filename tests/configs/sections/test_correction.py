"""The section `algorithm.correction`: what is in force, and every setting without an effect refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig


def resolved(correction: dict[str, Any], algorithm: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"algorithm": {**(algorithm or {}), "correction": correction}, **sections})


def test_an_empty_section_measures_and_weights_have_a_bound() -> None:
    """Resolving again changes nothing."""
    for given, filled in (
        ({}, {"weights": None, "cap": None, "band": None, "normalize": None, "reject": {}}),
        ({"weights": "token"}, {"cap": 2.0, "band": None, "normalize": False}),
        ({"weights": "sequence", "band": [0.5, 3]}, {"cap": None, "band": (0.5, 3.0)}),
    ):
        config = resolved(given)
        assert config.algorithm.correction is not None
        assert config.algorithm.correction.model_dump().items() >= filled.items()
        assert TrainConfig.model_validate(config.model_dump(mode="json")) == config
    assert TrainConfig().algorithm.correction is None


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"cap": 2.0}, "'cap' has no effect without 'weights'"),
        ({"band": [0.5, 2]}, "'band' has no effect without 'weights'"),
        ({"normalize": False, "reject": {"token_k1": 1.0}}, "'normalize' has no effect without 'weights'"),
        ({"proximal": "rollout", "weights": "token"}, "'weights' has no effect with proximal 'rollout'"),
        ({"proximal": "rollout", "cap": 2.0}, "'cap' has no effect without 'weights'"),
        ({"weights": "token", "cap": 2.0, "band": [0.5, 2]}, "'cap' and 'band' exclude each other"),
        ({"weights": "token", "band": [1.2, 2]}, "must begin between 0 and 1 and end above 1"),
        ({"weights": "token", "band": [0.5, 0.9]}, "must begin between 0 and 1 and end above 1"),
        ({"weights": "token", "cap": 0.9}, "greater than or equal to 1"),
        ({"reject": {"token_k1": 0}}, "greater than 0"),
        ({"reject": {"seq_median_k1": 0.1}}, "'seq_mean_k1'"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        resolved(correction)
    with pytest.raises(UserError, match="correction"):
        config_from_mapping({"algorithm": {"correction": correction}}, "test")


def test_a_loss_without_a_ratio_cannot_have_it_to_the_rollout() -> None:
    """Control: weights correct it, and a loss with a ratio may."""
    with pytest.raises(ValidationError, match="'reinforce', which has no ratio: use 'correction.weights'"):
        resolved({"proximal": "rollout"}, {"name": "gpg"})
    resolved({"weights": "token"}, {"name": "gpg"})
    resolved({"proximal": "rollout"}, {"name": "gspo"})


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}])
def test_a_cut_distribution_is_not_compared(sampling: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="cut the rollout's: remove them"):
        resolved({}, rollout=sampling)
    TrainConfig.model_validate({"rollout": sampling})


def test_old_log_probs_are_computed_only_where_they_are_needed() -> None:
    """Several steps and normalised weights need the pass; the rollout's own log-probs stand for it everywhere."""
    several, otb = {"mini_batches": 2}, {"name": "otb"}
    assert not resolved({"weights": "token", "reject": {"token_k1": 0.5}}).old_logprobs_needed
    assert resolved({"weights": "token", "normalize": True}).old_logprobs_needed
    assert resolved({"weights": "token"}, several).old_logprobs_needed
    for algorithm in ({}, several, otb, {"name": "kl_cov"}, {"kl": {"place": "reward", "estimator": "k1"}}):
        assert not resolved({"proximal": "rollout"}, algorithm).old_logprobs_needed
        assert resolved({}, algorithm).old_logprobs_needed == (algorithm != {})
