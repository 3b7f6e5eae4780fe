"""Layers that are to get adapters and do not exist are refused before anything starts, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import FAMILIES, write_family
from penstock.checks.model.adapters import check_targets
from penstock.checks.preferences import check_preferences
from penstock.checks.training import check_supervised
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.families.shape import expert_names, layer_names
from penstock.engines.families.table import family_of
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.weights.lora import adapted_layers, attach
from tests.engines.shared_ranks import Shape

MIXTURES = sorted(name for name, (model_type, _) in FAMILIES.items() if family_of(model_type).experts)


def _config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(sections)


def test_names_are_those_of_the_matrices_in_the_blocks(tmp_path: Path) -> None:
    """Not the embedding, nor norms."""
    Shape("qwen3", tied=False).write(tmp_path)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layer_names(tmp_path) == names


@pytest.mark.parametrize("name", MIXTURES)
def test_of_a_mixture_they_are_what_can_be_adapted(name: str, tmp_path: Path) -> None:
    """Neither experts nor routers, by what a rank itself does. Control: experts are named, too, but elsewhere."""
    lm = load_causal_lm(write_family(name, tmp_path), torch.float32, False)
    attach(lm, LoraConfig(rank=8), seed=0)
    names = layer_names(tmp_path)
    assert names == {key.split(".")[-2] for key in adapted_layers(lm)}
    assert {"gate_up_proj", "down_proj"} < expert_names(tmp_path) and "gate_up_proj" not in names


@pytest.mark.parametrize("target", ["gate_proj", "gate_up_proj", "gate"])
def test_experts_and_routers_are_no_targets(target: str, tmp_path: Path) -> None:
    """Said before the start, and of experts how they get adapters. Control: where an MLP has such a layer it passes."""
    config = {"model": {"path": str(write_family("Qwen 3 MoE", tmp_path / "model"))}}
    with pytest.raises(UserError, match=f"actor.lora.targets names '{target}'") as refusal:
        check_targets(_config(**config, actor={"lora": {"targets": [target]}}))
    assert ("actor.lora.experts=true" in str(refusal.value)) == (target != "gate")
    beside = {"model": {"path": str(write_family("GLM-4.5", tmp_path / "beside"))}}
    check_targets(_config(**beside, actor={"lora": {"targets": ["gate_proj"]}}))


@pytest.mark.parametrize("key", ["actor", "critic", "sft"])
def test_an_unknown_target_is_refused_and_known_ones_pass(key: str, tmp_path: Path) -> None:
    """Of a model's folder and of a tiny model that does not exist yet; without targets there is nothing to check."""
    Shape("llama", tied=True).write(tmp_path)
    common = {"algorithm": {"name": "ppo"}}
    for model in ({"path": str(tmp_path)}, {"tiny": {}}):
        for lora in (None, {}, {"targets": ["q_proj", "down_proj"]}):
            check_targets(_config(**common, model=model, **{key: {"lora": lora}}))
        with pytest.raises(UserError, match=rf"{key}.lora.targets names 'qkv'.*\n.*o_proj"):
            check_targets(_config(**common, model=model, **{key: {"lora": {"targets": ["q_proj", "qkv"]}}}))


@pytest.mark.parametrize("key", ["actor", "sft"])
def test_adapters_on_experts_need_experts_that_are_known(key: str, tmp_path: Path) -> None:
    """Controls: a mixture, a model without experts and without the option, and code that a mixture does not bring."""
    dense, mixture = (str(write_family(name, tmp_path / name)) for name in ("Qwen 3", "Mixtral"))

    def check(experts: bool, **model: Any) -> None:
        check_targets(_config(model=model, **{key: {"lora": {"experts": experts}}}))

    check(True, path=mixture)
    check(False, path=dense)
    for model in ({"path": dense}, {"tiny": {}}):
        with pytest.raises(UserError, match=f"{key}.lora.experts has no effect: the model has no experts"):
            check(True, **model)
    with pytest.raises(UserError, match=f"{key}.lora.experts is not for a model with code of its own"):
        check(True, path=mixture, trust_remote_code=True, code={"modeling_own.py": "0" * 64})


def test_adapters_on_experts_are_refused_where_nobody_has_compared_them() -> None:
    """Controls: each without them."""
    lora = {"experts": True}
    for tree, section, message in (
        (TrainConfig, {"algorithm": {"name": "ppo"}, "critic": {"lora": lora}}, "'lora.experts' is for policies"),
        (RewardModelConfig, {"trainer": {"lora": lora}}, "'trainer.lora.experts' is for policies"),
        (TrainConfig, {"actor": {"lora": lora, "zero_stage": 3}}, "'lora' needs 'zero_stage' 0, 1 or 2"),
        (TrainConfig, {"actor": {"lora": lora, "expert_parallel": 2}}, "does not go with 'lora'"),
        (TrainConfig, {"actor": {"lora": {**lora, "rank": 12}}}, "'rank' 12 does not go with 'experts'"),
    ):
        with pytest.raises(ValidationError, match=message):
            tree.model_validate(section)
    TrainConfig.model_validate({"algorithm": {"name": "ppo"}, "critic": {"lora": {}}, "actor": {"lora": lora}})
    RewardModelConfig.model_validate({"trainer": {"lora": {}}})
    PreferenceConfig.model_validate({"trainer": {"lora": lora}})
    TrainConfig.model_validate({"actor": {"lora": {"rank": 12}}})


def test_an_offline_training_is_refused_likewise_in_the_users_words(tmp_path: Path) -> None:
    """Of the section that is trained alone. Controls: targets that there are; the actor's, which `sft` ignores."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}\n', encoding="utf-8")
    right, wrong = {"lora": {"targets": ["q_proj"]}}, {"lora": {"targets": ["q_proj", "qkv"]}}

    def supervised(**sections: Any) -> None:
        data = {"sft": str(rows), "response": "response"}
        check_supervised(_config(model={"tiny": {}}, data=data, **sections))

    def preferring(trainer: dict[str, Any]) -> None:
        tree = {"model": {"tiny": {}}, "data": {"train": str(rows)}, "trainer": trainer}
        check_preferences(PreferenceConfig.model_validate(tree))

    supervised(sft=right, actor=wrong)
    preferring(right)
    with pytest.raises(UserError, match="^sft.lora.targets names 'qkv'"):
        supervised(sft=wrong)
    with pytest.raises(UserError, match="^trainer.lora.targets names 'qkv'"):
        preferring(wrong)
