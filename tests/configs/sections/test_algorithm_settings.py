"""Algorithms in the configuration: every name works on its defaults, and every setting has an effect or is refused.

Invariant: what the registry knows can be configured, and nothing else. A resolved tree holds exactly what is in force.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms.advantages import ADVANTAGES
from algorithms.algorithm import Algorithm
from algorithms.kl import KL_ESTIMATORS
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.registry import ALGORITHMS, settings_of
from configs.idle import idle_settings
from configs.loading.keys import describe_keys
from configs.schema import TrainConfig
from configs.sections.algorithm import ALGORITHM_SETTINGS, COMMON, AlgorithmConfig, KLConfig, check_settings
from penstock.base.errors import UserError
from tasks.iteration.refresh_reference import refresh_due

# A value other than every default, within bounds, of each setting.
OTHER: dict[str, Any] = {
    "normalize_by_std": None,  # its negation
    "whiten": None,
    "part_weights": {"format": 0.5},
    "dual_clip": 3.0,
    "divergence": "kl",
    "covariance_low": 0.7,
    "covariance_high": 7.0,
    "weight_bound": 7.0,
    "accept_best": 3,
}


def agents_of(advantage: str) -> dict[str, Any]:
    """What the data must say for an estimator that tells agents apart."""
    return {"data": {"agents": {"column": "role", "names": ["solver"]}}} if advantage == "ippo" else {}


def test_every_setting_is_a_field_and_every_field_a_setting() -> None:
    assert set(AlgorithmConfig.model_fields) == set(COMMON) | set(ALGORITHM_SETTINGS)
    assert all(AlgorithmConfig.model_fields[name].default is None for name in ALGORITHM_SETTINGS)


@pytest.mark.parametrize(("name", "words"), [("sharpness", "'sharpness'.* no field"), ("epochs", "another meaning")])
def test_a_setting_of_ours_that_no_recipe_can_hold_is_named(name: str, words: str) -> None:
    """A file with a new setting, and no field for it, says so at import. Control: those that are there have theirs."""
    check_settings({**ADVANTAGES, **POLICY_LOSSES})

    def estimator(inputs: Any, **settings: Any) -> None: ...

    estimator.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter("inputs", Parameter.POSITIONAL_ONLY), Parameter(name, Parameter.KEYWORD_ONLY, default=1)]
    )
    with pytest.raises(UserError, match=words):
        check_settings({"estimator": estimator})


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_a_name_fills_in_what_is_in_force(algorithm: Algorithm) -> None:
    """Functions, aggregation and settings with their defaults, all else null; resolving again changes nothing."""
    config = TrainConfig.model_validate({"algorithm": {"name": algorithm.name}, **agents_of(algorithm.advantage)})
    filled = config.algorithm
    assert filled.functions == (filled.advantage, filled.policy_loss) == (algorithm.advantage, algorithm.policy_loss)
    assert filled.aggregation == algorithm.aggregation
    expected = settings_of(*filled.functions) | dict(algorithm.defaults)
    assert {name: getattr(filled, name) for name in ALGORITHM_SETTINGS} == dict.fromkeys(ALGORITHM_SETTINGS) | expected
    assert TrainConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("name", ALGORITHM_SETTINGS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_setting_is_taken_where_it_applies_and_refused_elsewhere(algorithm: str, name: str) -> None:
    several = {"name": algorithm, "mini_batches": 2}
    default = getattr(AlgorithmConfig.model_validate(several), name)
    value = OTHER.get(name, 0.35)
    value = not default if value is None else value
    applies = name in settings_of(ALGORITHMS[algorithm].advantage, ALGORITHMS[algorithm].policy_loss)
    if applies:
        assert value != default
        assert getattr(AlgorithmConfig.model_validate({**several, name: value}), name) == value
        return
    with pytest.raises(ValidationError, match=f"'{name}' has no effect with advantage"):
        AlgorithmConfig.model_validate({**several, name: value})


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("grpo", "clip_low"), ("dapo", "clip_high"), ("ppo", "dual_clip"), ("gspo", "clip_high"), ("gmpo", "log_clip_low"),
     ("cispo", "clip_high"), ("sapo", "gate_positive"), ("dppo", "divergence_bound")],
)  # fmt: skip
def test_what_acts_on_a_ratio_is_refused_where_every_ratio_is_one(algorithm: str, name: str) -> None:
    """Controls: several steps, a ratio to the rollout, old log-probs of a pass of their own, the default itself."""
    given = {"name": algorithm, name: OTHER.get(name, 0.35)}
    with pytest.raises(ValidationError, match=f"'{name}' has no effect with one step per iteration"):
        AlgorithmConfig.model_validate(given)
    several: tuple[dict[str, Any], ...] = ({"mini_batches": 2}, {"epochs": 2}, {"correction": {"proximal": "rollout"}})
    for more in (*several, {"kl": {"place": "reward"}}):
        assert getattr(AlgorithmConfig.model_validate(given | more), name) == given[name]
    resolved = AlgorithmConfig.model_validate({"name": algorithm}).model_dump()
    assert AlgorithmConfig.model_validate(resolved).model_dump() == resolved


def test_tokens_chosen_to_be_dropped_are_no_bound_on_a_ratio() -> None:
    """Clip-Cov's choice has its effect at ratio 1; its clip is not refused, since its old log-probs have a pass."""
    AlgorithmConfig.model_validate({"name": "clip_cov", "covariance_low": 0.7, "clip_low": 0.3})


def test_a_value_clip_is_refused_where_values_have_not_moved() -> None:
    """Controls: two steps, and no clip at all, which is what holds then anyway."""
    tree = {"algorithm": {"name": "ppo"}, "critic": {"value_clip": 0.3}}
    with pytest.raises(ValidationError, match="'critic.value_clip' has no effect with one step per iteration"):
        TrainConfig.model_validate(tree)
    TrainConfig.model_validate(tree | {"algorithm": {"name": "ppo", "mini_batches": 2}})
    TrainConfig.model_validate(tree | {"critic": {"value_clip": None}})


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_any_estimator_goes_with_any_loss(advantage: str, loss: str) -> None:
    """What they need follows the functions, not the name: critic, greedy responses, log-probs, groups."""
    algorithm = {"advantage": advantage, "policy_loss": loss}
    config = TrainConfig.model_validate({"algorithm": algorithm, **agents_of(advantage)})
    assert ("critic" in config.roles) == (config.critic is not None) == (advantage in ("gae", "ippo"))
    assert ("greedy" in config.algorithm.needs) == (advantage == "remax")
    assert config.old_logprobs_needed == (advantage == "otb" or loss in ("clip_cov", "kl_cov"))


def test_samples_are_required_where_they_are_compared() -> None:
    alone = {"rollout": {"samples": 1}}
    for name in ("ppo", "reinforce", "reinforce_pp", "remax"):
        TrainConfig.model_validate({"algorithm": {"name": name}} | alone)
    for name in ("grpo", "rloo", "gspo", "pass_at_k"):
        with pytest.raises(ValidationError, match=f"at least 2 with algorithm '{name}'"):
            TrainConfig.model_validate({"algorithm": {"name": name}} | alone)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match="'gspo'"):
        AlgorithmConfig.model_validate({"name": "gpso"})
    assert all(name in next(key for key in describe_keys() if key.name == "algorithm.name").type for name in ALGORITHMS)


@pytest.mark.parametrize("estimator", [*KL_ESTIMATORS, "full"])
def test_every_kl_estimator_can_be_configured_where_it_differs(estimator: str) -> None:
    """A straight-through gradient has no effect in the reward, where none is taken."""
    KLConfig.model_validate({"estimator": estimator, "place": "loss"})
    if estimator.endswith("+"):
        with pytest.raises(ValidationError, match=r"remove the '\+'"):
            KLConfig.model_validate({"estimator": estimator, "place": "reward"})
    else:
        KLConfig.model_validate({"estimator": estimator, "place": "reward"})


def test_a_kl_in_the_reward_is_refused_where_only_its_parts_are_read() -> None:
    with pytest.raises(ValidationError, match="use 'kl.place: loss'"):
        AlgorithmConfig.model_validate({"name": "gdpo", "kl": {"place": "reward"}})
    AlgorithmConfig.model_validate({"name": "gdpo", "kl": {"place": "loss"}})
    AlgorithmConfig.model_validate({"name": "rloo", "kl": {"place": "reward"}})


def test_where_the_reference_has_a_pass_of_its_own() -> None:
    """Without a KL there is none; a full KL in the reward takes the reference's states into the actor's pass."""
    passes = {
        (place, estimator): AlgorithmConfig.model_validate({"kl": {"place": place, "estimator": estimator}})
        for place in ("loss", "reward")
        for estimator in ("k3", "full")
    }
    assert {key for key, config in passes.items() if not config.reference_pass} == {("reward", "full")}
    assert not AlgorithmConfig().reference_pass
    rollout = {"correction": {"proximal": "rollout"}}
    with pytest.raises(ValidationError, match="the trainer's own pass"):
        AlgorithmConfig.model_validate({"kl": {"place": "reward", "estimator": "full"}} | rollout)
    AlgorithmConfig.model_validate({"kl": {"place": "loss", "estimator": "full"}} | rollout)


def test_a_refresh_without_an_effect_is_said_and_one_without_a_copy_refused() -> None:
    """After the last iteration nothing uses it; adapters share their weights with the reference."""
    tree: dict[str, Any] = {"iterations": 10, "algorithm": {"kl": {"refresh_every": 9}}}
    assert [number for number in range(1, 11) if refresh_due(TrainConfig.model_validate(tree), number)] == [9]
    three = TrainConfig.model_validate({"iterations": 9, "algorithm": {"kl": {"refresh_every": 3}}})
    assert [number for number in range(1, 10) if refresh_due(three, number)] == [3, 6]
    assert idle_settings(TrainConfig.model_validate(tree | {"iterations": 9})) == [
        "'algorithm.kl.refresh_every' (9) has no effect: the training has 9 iterations"
    ]
    assert idle_settings(TrainConfig.model_validate(tree)) == []
    with pytest.raises(ValidationError, match="does not go with 'actor.lora'"):
        TrainConfig.model_validate(tree | {"actor": {"lora": {}}})


def test_the_held_out_kl_is_measured_where_there_is_a_reference() -> None:
    """By default with one, never without; a resolved tree says so, and resolving again changes nothing."""
    without, beside = TrainConfig(), TrainConfig.model_validate({"algorithm": {"kl": {}}})
    assert without.evaluate.evaluators == ["rewards", "diversity", "length"]
    assert beside.evaluate.evaluators == ["rewards", "diversity", "length", "kl"]
    assert TrainConfig.model_validate(beside.model_dump()) == beside
    with pytest.raises(ValidationError, match="there is no reference"):
        TrainConfig.model_validate({"evaluate": {"evaluators": ["kl"]}})
    chosen = {"evaluate": {"evaluators": ["length"]}, "algorithm": {"kl": {}}}
    assert TrainConfig.model_validate(chosen).evaluate.evaluators == ["length"]


def test_dynamic_sampling_needs_samples_to_compare() -> None:
    dynamic = {"dynamic_sampling": {}}
    assert AlgorithmConfig.model_validate({"name": "rloo"} | dynamic).dynamic_sampling is not None
    with pytest.raises(ValidationError, match="compares no samples"):
        AlgorithmConfig.model_validate({"name": "ppo"} | dynamic)


def test_a_buffer_longer_than_a_response_is_refused() -> None:
    rollout = {"max_response_tokens": 100}
    TrainConfig.model_validate({"rollout": rollout, "reward": {"overlong": {"buffer_tokens": 100}}})
    with pytest.raises(ValidationError, match="must not exceed 'rollout.max_response_tokens'"):
        TrainConfig.model_validate({"rollout": rollout, "reward": {"overlong": {"buffer_tokens": 101}}})
