"""The trees of preference and reward model: columns and settings belong to a loss, and errors name their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.loading.load import load_tree, to_yaml
from configs.preference import PreferenceConfig, RewardModelConfig
from engines.groups.placement import place
from penstock.base.errors import UserError


def load(tmp_path: Path, text: str, *overrides: str, kind: Any = PreferenceConfig) -> Any:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return load_tree(tmp_path / "recipe.yaml", overrides, kind)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.name=kto", "data.chosen=good"], "'chosen' has no effect with loss 'kto'"),
        (["data.label=good"], "'label' has no effect with loss 'dpo'"),
        (["loss={name: orpo, beta: 0.2}"], "'beta' has no effect with loss 'orpo'"),
        (["loss.label_smoothing=0.5"], "less than 0.5"),
        (["loss.bete=0.5"], "did you mean 'loss.beta'?"),
        (["rollout.prompts=5"], "names no key"),
        (["devices={gpus: [0], ranks: 1}"], "exclude each other"),
        (["data.template=no place"], "must contain {prompt}"),
        (["trainer={offload_optimizer: true, zero_stage: 2}"], "trainer: 'offload_optimizer' has no effect here"),
    ],
)
def test_refusals(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?").replace("{", r"\{")):
        load(tmp_path, "data: {train: a.jsonl}", *overrides)


def test_devices_are_those_of_the_engines(tmp_path: Path) -> None:
    """GPUs by their numbers, or how many CPU ranks; null: what there is."""
    given: list[tuple[str, int, list[int | None]]] = [
        ("devices={gpus: [2, 0]}", 4, [2, 0]),
        ("devices={ranks: 3}", 0, [None] * 3),
        ("devices={}", 2, [0, 1]),
    ]
    for override, gpus, expected in given:
        (spec,) = place(load(tmp_path, "data: {train: a.jsonl}", override).engines(), gpus, tmp_path)
        assert [device.gpu for device in spec.devices] == expected


def test_a_part_of_a_tree_is_laid_over_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As deployments give it: `base` names the recipe, and what the form sends goes over it."""
    monkeypatch.chdir(tmp_path)
    load(tmp_path, "data: {prompt: question}\nseed: 7")
    given = {"base": str(tmp_path / "recipe.yaml"), "data": {"train": "a.jsonl"}, "loss": {"name": "kto"}}
    config = PreferenceConfig.model_validate(given)
    assert (config.seed, config.data.prompt, config.data.train) == (7, "question", "a.jsonl")
    assert (config.base, config.data.label) == (None, "label")
    with pytest.raises(UserError, match="does not exist"):
        RewardModelConfig.model_validate({"base": "absent.yaml"})


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "kto"])
def test_a_resolved_tree_loads_back_to_itself(tmp_path: Path, loss: str) -> None:
    """What validation filled in is what is in force."""
    config = load(tmp_path, "data: {train: a.jsonl}", f"loss.name={loss}", "devices.ranks=2")
    assert load(tmp_path, to_yaml(config)) == config
    assert (config.data.label, config.data.chosen) == (("label", None) if loss == "kto" else (None, "chosen"))
    assert all(value is not None for value in config.loss.arguments.values())
    assert config.engines().groups["main"].ranks == 2
