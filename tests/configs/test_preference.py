"""The trees of preference and reward model: columns and settings belong to a loss, and errors name their keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.algorithms.declarations.settings import settings
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.registry import every_preference_setting
from penstock.base.errors import UserError
from penstock.configs.loading.keys import describe_keys
from penstock.configs.loading.load import load_tree, to_yaml
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.engines.groups.placement import place
from tests import own_algorithm


def load(tmp_path: Path, text: str, *overrides: str, kind: Any = PreferenceConfig) -> Any:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return load_tree(tmp_path / "recipe.yaml", overrides, kind)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.name=kto", "data.chosen=good"], "'chosen' has no effect with loss 'kto'"),
        (["data.label=good"], "'label' has no effect with loss 'dpo'"),
        (["loss={name: orpo, settings: {beta: 0.2}}"], "loss.settings.beta: has no effect with loss 'orpo'"),
        (["loss.settings.label_smoothing=0.5"], "loss.settings.label_smoothing: must be less than 0.5"),
        (["loss.settings.beta=0"], "loss.settings.beta: must be greater than 0"),
        (["loss.settings.beta={0: 0.1, 5: 0.2}"], "loss.settings.beta: must be a number"),
        (["loss.settings.bete=0.5"], "loss.settings.bete: unknown setting (did you mean 'beta'?)"),
        (["loss.beta=0.5"], "'beta' exists at loss.settings.beta"),
        (["loss.name=dpoo"], "did you mean 'dpo'?"),
        (["loss.name=tests.own_algorithm:pulll"], "did you mean 'pull'?"),
        (["loss.name=tests.own_algorithm:pull", "loss.settings.strength=-1"], "must be greater than 0"),
        (["loss.name=tests.own_algorithm:pull", "data.label=good"], "'label' has no effect with loss"),
        (["rollout.prompts=5"], "names no key"),
        (["devices={gpus: [0], ranks: 1}"], "exclude each other"),
        (["data.template=no place"], "must contain {prompt}"),
        (["trainer={offload_optimizer: true, zero_stage: 2}"], "trainer: 'offload_optimizer' has no effect here"),
    ],
)
def test_refusals(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path, "data: {train: a.jsonl}", *overrides)


def test_a_loss_of_ones_own_brings_its_settings_and_says_which_data_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module says so, as a file of ours does. Control: what one of ours takes is not taken."""
    own = ("data: {train: a.jsonl}", "loss.name=tests.own_algorithm:pull")
    config = load(tmp_path, *own, "loss.settings.strength=2")
    assert config.loss.settings == {"strength": 2.0}
    assert (config.loss.labelled, config.loss.needs_reference, config.data.chosen) == (False, True, "chosen")
    assert load(tmp_path, to_yaml(config)) == config
    with pytest.raises(UserError, match=r"loss.settings.beta: has no effect with loss 'tests.own_algorithm:pull'"):
        load(tmp_path, *own, "loss.settings.beta=2")
    for name in ("LABELLED", "REFERENCE"):
        monkeypatch.setattr(own_algorithm, name, name == "LABELLED", raising=False)
    config = load(tmp_path, *own)
    assert (config.loss.labelled, config.loss.needs_reference, config.data.label) == (True, False, "label")


def test_a_form_and_the_list_of_keys_know_every_setting() -> None:
    """Control: of a policy loss they know none."""
    keys = {key.name: key for key in describe_keys(PreferenceConfig) if key.name.startswith("loss.settings.")}
    assert set(keys) == {f"loss.settings.{name}" for name in every_preference_setting()}
    assert keys["loss.settings.label_smoothing"].type == "number >= 0 and < 0.5"
    assert "loss.settings.clip_low" not in keys
    schema = PreferenceConfig.model_json_schema()["$defs"]["PreferenceLossConfig"]["properties"]["settings"]
    assert set(schema["properties"]) == set(every_preference_setting())


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
    assert config.loss.settings == {name: s.default for name, s in settings(PREFERENCE_LOSSES[loss]).items()}
    assert config.engines().groups["main"].ranks == 2
