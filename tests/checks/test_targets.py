"""Layers that are to get adapters and do not exist are refused before anything starts, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.model import check_targets
from penstock.checks.preferences import check_preferences
from penstock.checks.training import check_supervised
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import layer_names
from tests.engines.shared_ranks import Shape


def _config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(sections)


def test_names_are_those_of_the_matrices_in_the_blocks(tmp_path: Path) -> None:
    """Not the embedding, nor norms."""
    Shape("qwen3", tied=False).write(tmp_path)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layer_names(tmp_path) == names


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
