"""Algorithms in the configuration: every name works on its defaults, and every setting has an effect or is refused.

Invariant: what the registry knows can be configured, and nothing else. A resolved tree holds exactly what is in force.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.algorithms.registry import ALGORITHMS, every_setting, settings_of
from penstock.base.errors import UserError
from penstock.configs.idle import idle_settings
from penstock.configs.loading.keys import describe_keys, suggest
from penstock.configs.loading.load import config_from_mapping, to_yaml
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.algorithm import AlgorithmConfig, KLConfig
from penstock.configs.tree.recipes import merge, parse
from penstock.tasks.iteration.refresh_reference import refresh_due
from tests.algorithms.values import other_value


def agents_of(advantage: str) -> dict[str, Any]:
    """What the data must say for an estimator that tells agents apart."""
    return {"data": {"agents": {"column": "role", "names": ["solver"]}}} if advantage == "ippo" else {}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_a_name_fills_in_what_is_in_force(algorithm: Algorithm) -> None:
    """Functions, aggregation and settings with their defaults, no others; resolving again changes nothing."""
    config = TrainConfig.model_validate({"algorithm": {"name": algorithm.name}, **agents_of(algorithm.advantage)})
    filled = config.algorithm
    assert filled.functions == (filled.advantage, filled.policy_loss) == (algorithm.advantage, algorithm.policy_loss)
    assert filled.aggregation == algorithm.aggregation
    defaults = {name: setting.default for name, setting in settings_of(*filled.functions).items()}
    assert filled.settings == defaults | dict(algorithm.defaults)
    assert TrainConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("name", every_setting())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_setting_is_taken_where_it_applies_and_refused_elsewhere(algorithm: str, name: str) -> None:
    """Null where it does not apply takes back what a base recipe gave."""
    several = {"name": algorithm, "mini_batches": 2}
    default = AlgorithmConfig.model_validate(several).settings
    setting = settings_of(ALGORITHMS[algorithm].advantage, ALGORITHMS[algorithm].policy_loss).get(name)
    if setting is not None:
        value = other_value(setting)
        assert AlgorithmConfig.model_validate({**several, "settings": {name: value}}).settings == default | {
            name: value
        }
        return
    with pytest.raises(ValidationError, match=rf"settings\.{name}\n +has no effect with advantage"):
        AlgorithmConfig.model_validate({**several, "settings": {name: 0.35}})
    assert AlgorithmConfig.model_validate({**several, "settings": {name: None}}).settings == default


@pytest.mark.parametrize(
    ("algorithm", "given", "words"),
    [
        ("grpo", {"clip_lwo": 0.1}, r"clip_lwo: unknown setting \(did you mean 'clip_low'\?\); settings of advantage "
         "'grpo' and policy loss 'ppo_clip': normalize_by_std, clip_low, clip_high, dual_clip"),
        ("grpo", {"clip_lwo": None}, "clip_lwo: unknown setting"),
        ("grpo", {"gae_lambda": 1}, "gae_lambda: has no effect with advantage 'grpo' and policy loss 'ppo_clip': "
         "remove it, it is a setting of gae, ippo"),
        ("grpo", {"clip_low": -1}, r"clip_low: must be greater than or equal to 0 \(given: -1\)"),
        ("grpo", {"clip_low": {0: 0.1, 5: -1}}, r"clip_low: must be greater than or equal to 0 \(given: -1\)"),
        ("grpo", {"clip_low": {1: 0.1}}, "clip_low: a schedule needs a value for iteration 0"),
        ("grpo", {"clip_low": float("inf")}, "clip_low: must be a finite number"),
        ("grpo", {"clip_low": float("nan")}, "clip_low: must be a finite number"),
        ("grpo", {"clip_low": "wide"}, r"clip_low: must be a number.* \(given: 'wide'\)"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip: must be greater than 1"),
        ("grpo", {"normalize_by_std": "maybe"}, "normalize_by_std: must be true or false"),
        ("ppo", {"gamma": 1.5}, "gamma: must be less than or equal to 1"),
        ("best_of_n", {"accept_best": 0}, "accept_best: must be greater than or equal to 1"),
        ("best_of_n", {"accept_best": 1.5}, "accept_best: must be a whole number"),
        ("best_of_n", {"accept_best": {0: 1}}, "accept_best: must be a whole number"),
        ("gdpo", {"part_weights": {"format": "much"}}, "part_weights: must be a number"),
        ("gdpo", {"part_weights": 1.0}, "part_weights: "),
        ("dppo", {"divergence": "chi"}, "divergence: must be 'kl' or 'tv'"),
    ],
)  # fmt: skip
def test_what_a_function_does_not_take_is_named(algorithm: str, given: dict[str, Any], words: str) -> None:
    """Unknown names, wrong types, values outside of the bounds. The control is the test before."""
    tree = {"algorithm": {"name": algorithm, "mini_batches": 2, "settings": given}}
    with pytest.raises(UserError, match=rf"algorithm\.settings\.{words}"):
        config_from_mapping(tree, "a recipe")


def test_every_wrong_setting_is_named_at_once() -> None:
    """With what is wrong beside them in the section. Control: one of them corrected is no longer named."""
    given = {"clip_low": -1, "whitten": True, "dual_clip": 0.5}
    tree = {"algorithm": {"settings": given, "kl": {"horizon": 1}, "mini_batches": 2}}
    with pytest.raises(UserError, match="4 settings are wrong") as caught:
        config_from_mapping(tree, "a recipe")
    assert all(f"algorithm.settings.{name}: " in caught.value.problem for name in given)
    given["dual_clip"] = 3.0
    with pytest.raises(UserError, match="3 settings are wrong"):
        config_from_mapping(tree, "a recipe")


def test_null_is_a_value_where_a_setting_may_be_null_and_else_the_default() -> None:
    """A base recipe's value is taken back. Control: the setting beside them keeps it."""
    base = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}
    over = {"clip_low": None, "dual_clip": None}
    merged = merge({"settings": base, "mini_batches": 2}, {"settings": over})
    filled = AlgorithmConfig.model_validate(merged).settings
    assert (filled["clip_low"], filled["clip_high"], filled["dual_clip"]) == (0.2, 0.3, None)


def test_steps_of_a_setting_survive_yaml_and_json() -> None:
    """Also null as one of them, where the setting may be null. Control: at another iteration another value holds."""
    steps = {"clip_low": {0: 0.1, 5: 0.3}, "dual_clip": {0: None, 5: 3.0}}
    config = config_from_mapping({"algorithm": {"settings": steps, "mini_batches": 2}}, "a recipe")
    for again in (parse(to_yaml(config), "the tree"), json.loads(config.model_dump_json())):
        assert config_from_mapping(again, "the tree") == config
    values = [config.algorithm.settings_at(iteration) for iteration in (4, 5)]
    assert [(value["clip_low"], value["dual_clip"]) for value in values] == [(0.1, None), (0.3, 3.0)]
    assert values[0]["clip_high"] == 0.2


def test_a_form_and_the_list_of_keys_know_every_setting() -> None:
    """The form without defaults, which it would send; what it does not know, a user's, is taken as well."""
    schema = TrainConfig.model_json_schema()["$defs"]["AlgorithmConfig"]["properties"]["settings"]
    assert set(schema["properties"]) == set(every_setting())
    assert schema["additionalProperties"] is True
    assert all("default" not in described and described["description"] for described in schema["properties"].values())
    keys = {key.name: key for key in describe_keys()}
    assert keys["algorithm.settings.dual_clip"].type == "number > 1 or {iteration: number > 1 or null} or null"
    assert keys["algorithm.settings.part_weights"].type == "{name: number} or null"
    assert "gspo 0.0003" in keys["algorithm.settings.clip_low"].description
    assert suggest(["algorithm", "clip_low"]) == "'clip_low' exists at algorithm.settings.clip_low"


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("grpo", "clip_low"), ("dapo", "clip_high"), ("ppo", "dual_clip"), ("gspo", "clip_high"), ("gmpo", "log_clip_low"),
     ("cispo", "clip_high"), ("sapo", "gate_positive"), ("dppo", "divergence_bound")],
)  # fmt: skip
def test_what_acts_on_a_ratio_is_refused_where_every_ratio_is_one(algorithm: str, name: str) -> None:
    """Controls: several steps, a ratio to the rollout, old log-probs of a pass of their own, the default itself."""
    value = 3.0 if name == "dual_clip" else 0.35
    given = {"name": algorithm, "settings": {name: value}}
    with pytest.raises(ValidationError, match=rf"'algorithm\.settings\.{name}' has no effect with one step per iter"):
        AlgorithmConfig.model_validate(given)
    several: tuple[dict[str, Any], ...] = ({"mini_batches": 2}, {"epochs": 2}, {"correction": {"proximal": "rollout"}})
    for more in (*several, {"kl": {"place": "reward"}}):
        assert AlgorithmConfig.model_validate(given | more).settings[name] == value
    resolved = AlgorithmConfig.model_validate({"name": algorithm}).model_dump()
    assert AlgorithmConfig.model_validate(resolved).model_dump() == resolved


def test_tokens_chosen_to_be_dropped_are_no_bound_on_a_ratio() -> None:
    """Clip-Cov's choice has its effect at ratio 1; its clip is not refused, since its old log-probs have a pass."""
    AlgorithmConfig.model_validate({"name": "clip_cov", "settings": {"covariance_low": 0.7, "clip_low": 0.3}})


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
