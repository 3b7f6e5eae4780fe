"""The schema: what would do nothing is refused, what was left open is filled, and the shipped recipes are valid.

Invariant: in a valid configuration every key that is set has an effect.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.configs.loading.load import config_from_mapping, load_config, load_tree, to_yaml
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.schedule import value_at

KINDS = {"dpo": PreferenceConfig, "reward_model": RewardModelConfig}  # of recipes that are no trainings
CHAINS = {"chain"}  # recipes of several (test_chain.py)
RECIPES = [path for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")) if path.stem not in CHAINS]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour": 1}, "Extra inputs"),
        ({"rollout": {"colour": 1}}, "Extra inputs"),
        ({"algorithm": {"settings": {"gamma": 1.0}}}, r"algorithm\.settings\.gamma\n +has no effect"),
        ({"algorithm": {"settings": {"gae_lambda": 1.0}}}, r"algorithm\.settings\.gae_lambda\n +has no effect"),
        ({"algorithm": {"settings": {"whiten": True}}}, r"algorithm\.settings\.whiten\n +has no effect"),
        ({"algorithm": {"name": "ppo", "settings": {"normalize_by_std": True}}}, r"normalize_by_std\n +has no effect"),
        ({"algorithm": {"kl": {"horizon": 5}}}, "'horizon' has no effect"),
        ({"algorithm": {"kl": {"ceiling": 5}}}, "'ceiling' has no effect"),
        ({"algorithm": {"kl": {"target": 1, "coefficient": {0: 1}}}}, "remove one"),
        ({"actor": {"optimizer": {"min_ratio": 0.1}}}, "'min_ratio' has no effect"),
        ({"critic": {}}, "'critic' has no effect"),
        ({"checkpoint": {"every": 0, "keep": 3}}, "'keep' has no effect"),
        ({"checkpoint": {"best": "smallest heldout/kl"}}, "with 'lowest' before it"),
        ({"checkpoint": {"best": "lowest"}}, "name a figure"),
        ({"checkpoint": {"best": " "}}, "name a figure"),
        ({"record": {"samples_every": 0, "samples": 3}}, "'samples' has no effect where 'samples_every' is 0"),
        ({"reward": {"settings": {"a": 1}}}, "'settings' has no effect"),
        ({"reward": {"function": "m:f", "model": "m"}}, "exclude each other"),
        ({"reward": {"function": "m:f", "failure_value": -1e300}}, "greater than or equal to -1"),
        ({"reward": {"function": "m:f", "failure_value": float("nan")}}, "less than or equal to 1"),
        ({"reward": {"model": "m", "failure_value": -1.0}}, "'reward.failure_value' has no effect with 'reward.model'"),
        ({"reward": {"model": "m", "max_failure_share": 0.5}}, "'reward.max_failure_share' has no effect"),
        ({"model": {"path": "m", "tiny": {}}}, "exclude each other"),
        ({"data": {"sft": "a.jsonl"}}, "have no effect without an 'sft' section"),
        ({"data": {"arithmetic": {}, "train": "a.jsonl"}}, "makes its own problems"),
        ({"data": {"template": "no place"}}, "must contain {prompt}"),
        ({"data": {"arithmetic": {}, "prompt": "question"}}, "has columns of its own names"),
        ({"data": {"arithmetic": {"calls": 0.5, "mistakes": 0.1}}}, "'calls' and 'mistakes' are different teachers"),
        ({"rollout": {"samples": 1}}, "at least 2 with algorithm 'grpo'"),
        (
            {"rollout": {"prompts": 3}, "algorithm": {"mini_batches": 2, "mini_batch_of": "prompts"}},
            r"'rollout.prompts' \(3\) must be a multiple",
        ),
        ({"groups": {"a": {"roles": ["actor", "rollout", "critic"]}}}, "places critic, which"),
        ({"groups": {"a": {"roles": ["actor"]}}}, "places no rollout"),
        (
            {"groups": {"a": {"roles": ["actor", "rollout"]}, "b": {"roles": ["rollout"]}}},
            "places rollout in several groups: each of them must hold it alone",
        ),
        (
            {"groups": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"], "elastic": True}}},
            "has the rollout in elastic groups alone",
        ),
        ({"groups": {"a": {"roles": ["actor", "rollout"], "elastic": True}}}, "that hold the rollout alone"),
        ({"groups": {"a": {"roles": ["actor", "rollout"], "gpus": [0], "ranks": 1}}}, "exclude each other"),
        ({"evaluate": {"samples": 4}}, "greedy responses to a prompt are all the same"),
        ({"data": {"arithmetic": {"forgotten_carries": 0.5, "mistakes": 0.1}}}, "are different teachers"),
        ({"algorithm": {"mini_batch_of": "prompts"}}, "'mini_batch_of' has no effect with one mini-batch"),
        ({"rollout": {"prompts": 3, "samples": 2}, "algorithm": {"mini_batches": 4}}, "must be a multiple of"),
        ({"evaluate": {"evaluators": ["reward"]}}, "has 'reward': name one of rewards, diversity, length"),
        ({"evaluate": {"evaluators": ["m:E", "m:E"]}}, "'m:E' twice"),
        ({"rollout": {"temperature": {5: 1.0}}}, "iteration 0"),
        ({"rollout": {"temperature": -1.0}}, "must not be negative"),
        ({"rollout": {"temperature": 0}}, "must be greater than 0"),
        ({"rollout": {"temperature": {0: 1.0, 5: 0.0}}}, "must be greater than 0"),
        ({"rollout": {"temperature": {0: 1.0, 5: float("nan")}}}, "must be finite"),
        ({"actor": {"micro_batch_tokens": 0}}, "must be greater than 0"),
        ({"actor": {"optimizer": {"learning_rate": float("inf")}}}, "must be finite"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    """Unknown keys, keys without effect and keys that exclude each other."""
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": {"settings": {"normalize_by_std": False}}},
        {
            "algorithm": {"name": "ppo", "settings": {"gamma": 0.9, "gae_lambda": 0.9, "whiten": False}},
            "critic": {},
        },
        {"algorithm": {"kl": {"target": 0.1, "horizon": 5, "ceiling": 2}}},
        {"actor": {"optimizer": {"decay": "cosine", "min_ratio": 0.1}}},
        {"reward": {"function": "m:f", "settings": {"a": 1}}},
        {"reward": {"function": "m:f", "failure_value": -1.0, "max_failure_share": 0.5}},
        {"reward": {"model": "m", "failure_value": -1.0, "max_failure_share": 0.5}, "environment": {"type": "m:E"}},
        {"sft": {}, "data": {"sft": "a.jsonl", "response": "r"}},
        {"algorithm": {"name": "ppo"}, "rollout": {"samples": 1}},
        {"groups": {"a": {"roles": ["actor", "rollout"], "gpus": [0, 1]}}},
        {"rollout": {"temperature": {0: 1.0, 5: 0.5}}},
    ],
)
def test_what_the_refusals_do_not_touch(values: dict[str, Any]) -> None:
    """The control: the same keys where they do have an effect."""
    TrainConfig.model_validate(values)


def test_open_settings_are_filled_where_they_apply() -> None:
    """A resolved tree shows what is in force; a critic that is not described trains like the actor."""
    grpo = TrainConfig()
    assert grpo.algorithm.settings == {"normalize_by_std": True, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert grpo.critic is None
    ppo = config_from_mapping({"algorithm": {"name": "ppo"}, "actor": {"optimizer": {"learning_rate": 3e-6}}}, "x")
    assert {"gamma": 1.0, "gae_lambda": 0.95, "whiten": True}.items() <= ppo.algorithm.settings.items()
    assert ppo.critic is not None and ppo.critic.optimizer == ppo.actor.optimizer


def test_roles_follow_the_algorithm() -> None:
    """Only models that are used are loaded."""
    assert TrainConfig().roles == ("actor", "rollout")
    values = {"algorithm": {"name": "ppo", "kl": {}}, "reward": {"model": "m"}}
    assert TrainConfig.model_validate(values).roles == ("actor", "critic", "reference", "reward", "rollout")


def test_old_log_probs_are_asked_for_only_where_they_are_used() -> None:
    """They cost a pass over the experience: none when every step is on policy and the KL is not in the reward."""
    assert not TrainConfig().old_logprobs_needed
    for algorithm in ({"mini_batches": 2}, {"epochs": 2}, {"kl": {"place": "reward"}}):
        assert TrainConfig.model_validate({"algorithm": algorithm}).old_logprobs_needed
    assert not TrainConfig.model_validate({"algorithm": {"kl": {"place": "loss"}}}).old_logprobs_needed


@pytest.mark.parametrize(("iteration", "value"), [(1, 1.0), (99, 1.0), (100, 0.5), (500, 0.5)])
def test_a_schedule_holds_each_value_from_its_iteration_on(iteration: int, value: float) -> None:
    """Steps, no interpolation; keys in any order."""
    temperature = TrainConfig.model_validate({"rollout": {"temperature": {100: 0.5, 0: 1.0}}}).rollout.temperature
    assert value_at(temperature, iteration) == value


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_optimizer_rests_in_host_memory_only_where_deepspeed_can_move_it(stage: int) -> None:
    """Stage 2 is the one; in the warm-up, and alone in a group, the freed memory would be nobody's."""
    offloading = {"offload_optimizer": True, "zero_stage": 2}
    assert TrainConfig.model_validate({"actor": offloading}).actor.offload_optimizer
    with pytest.raises(ValidationError, match=f"needs 'zero_stage' 2, not {stage}"):
        TrainConfig.model_validate({"actor": {"offload_optimizer": True, "zero_stage": stage}})
    with pytest.raises(ValidationError, match="nothing else needs the memory"):
        TrainConfig.model_validate({"sft": offloading})
    ppo = {"algorithm": {"name": "ppo"}, "critic": offloading}
    groups = {"main": {"gpus": [0], "roles": ["actor", "rollout"]}, "critic": {"gpus": [1], "roles": ["critic"]}}
    assert TrainConfig.model_validate(ppo).critic is not None
    with pytest.raises(ValidationError, match="nothing else is in its group"):
        TrainConfig.model_validate({**ppo, "groups": groups})


def test_states_of_a_reference_are_not_shared_out() -> None:
    """A KL over the vocabulary is for ranks that compute each row whole. Controls: each of the two by itself."""
    full = {"kl": {"place": "loss", "estimator": "full", "coefficient": 0.1}}
    together = {"sequence_parallel": 2}
    TrainConfig.model_validate({"algorithm": full})
    TrainConfig.model_validate({"algorithm": {"kl": {}}, "actor": together})
    with pytest.raises(ValidationError, match=r"'actor\.sequence_parallel' does not go with"):
        TrainConfig.model_validate({"algorithm": full, "actor": together})


def test_there_are_recipes() -> None:
    """The tests below are not vacuous."""
    assert {"grpo_gsm8k", "ppo_gsm8k", *KINDS} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_and_resolves_to_itself(path: Path, tmp_path: Path) -> None:
    """Each loads, and written out in full it is the same configuration."""
    kind: Any = KINDS.get(path.stem, TrainConfig)
    config = load_tree(path, (), kind)
    (tmp_path / path.name).write_text(to_yaml(config), encoding="utf-8")
    assert load_tree(tmp_path / path.name, (), kind) == config


def test_ppo_on_gsm8k_differs_from_grpo_only_in_the_algorithm() -> None:
    """The two are meant to be compared: same data, model, reward and batch, and a critic that learns faster."""
    grpo, ppo = (load_config(path) for path in RECIPES if path.name in ("grpo_gsm8k.yaml", "ppo_gsm8k.yaml"))
    for section in ("model", "data", "reward", "rollout", "actor", "evaluate", "iterations", "seed"):
        assert getattr(grpo, section) == getattr(ppo, section)
    assert ppo.critic is not None
    assert ppo.critic.optimizer.learning_rate > ppo.actor.optimizer.learning_rate  # type: ignore[operator]


def test_a_rank_counts_as_lost_after_15_s_of_silence() -> None:
    """What a recipe gets that does not say."""
    assert TrainConfig().engine.heartbeat_timeout_s == 15.0


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"offload": "optimizer"}, "'offload' optimizer needs 'zero_stage' 3, not 1"),
        ({"offload": "all", "zero_stage": 3, "hpz": True}, "'hpz' does not go with 'offload'"),
        ({"offload": "nvme", "zero_stage": 3}, "'nothing', 'optimizer' or 'all'"),
        ({"offload_folder": "/disk", "zero_stage": 3}, "'offload_folder' has no effect without 'offload'"),
        ({"offload": "all", "zero_stage": 3, "offload_folder": "disk"}, "'offload_folder' disk must begin with /"),
        ({"offload_activations": True}, "'offload_activations' needs 'gradient_checkpointing' true"),
        ({"offload_optimizer": True, "zero_stage": 3}, "with 'offload' the state is in host memory for good"),
    ],
)
def test_what_lives_in_host_memory_is_for_zero_3(actor: dict[str, Any], message: str) -> None:
    """Each refusal says what to change. Control: what is left is valid."""
    TrainConfig.model_validate({"actor": {"offload": "all", "zero_stage": 3, "offload_folder": "/disk"}})
    with pytest.raises(ValidationError, match=re.escape(message)):
        TrainConfig.model_validate({"actor": actor})


def test_fp8_is_for_whole_weights_that_every_rank_has() -> None:
    """In bfloat16, which is stages 1 and 2. Control: these are valid."""
    for stage in (1, 2):
        assert TrainConfig.model_validate({"actor": {"fp8": True, "zero_stage": stage}}).actor.fp8
    for others, message in (
        ({"zero_stage": 3}, "'fp8' needs 'zero_stage' 1 or 2, not 3"),
        ({"zero_stage": 0}, "'fp8' needs 'zero_stage' 1 or 2, not 0"),
        ({"lora": {}}, "'fp8' does not go with 'lora'"),
    ):
        with pytest.raises(ValidationError, match=message):
            TrainConfig.model_validate({"actor": {"fp8": True, **others}})
