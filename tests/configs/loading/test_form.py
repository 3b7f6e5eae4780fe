"""What Prefect's form is given of a recipe: every key, and together the same configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from configs.loading.form import form_values
from configs.loading.load import load_config
from configs.preference import PreferenceConfig, RewardModelConfig
from configs.schema import TrainConfig
from configs.tree.annotations import section_in
from configs.tree.section import Recipe

RECIPES: list[tuple[str, type[Recipe]]] = [
    ("quickstart", TrainConfig),
    ("grpo_gsm8k", TrainConfig),
    ("ippo_arithmetic", TrainConfig),
    ("dpo", PreferenceConfig),
    ("reward_model", RewardModelConfig),
]


def missing(values: dict[str, Any], kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the keys of `kind` that `values` lack, sections that are there included."""
    lacking = [prefix + name for name in kind.model_fields if name not in values]
    for name, value in values.items():
        section = section_in(kind.model_fields[name].annotation)
        if section and value is not None:
            lacking += missing(value, section, f"{prefix}{name}.")
    return lacking


@pytest.mark.parametrize(("name", "kind"), RECIPES)
def test_a_form_has_every_key_and_is_the_recipe(name: str, kind: type[Recipe]) -> None:
    """Also after a way through JSON. Control: the recipe itself lacks keys, which a form would fill with defaults."""
    base = {"base": f"configs/{name}.yaml"}
    values = json.loads(json.dumps(form_values(base, kind, Path())))
    assert missing(values, kind) == []
    assert missing(base, kind)
    assert values["base"] is None
    assert kind.model_validate(values).model_dump(exclude={"base"}) == kind.model_validate(base).model_dump(
        exclude={"base"}
    )


def test_settings_that_follow_from_others_are_filled_in_anew_for_a_changed_key() -> None:
    """GRPO's recipe becomes PPO by its name alone, as on the command line. Control: the resolved tree keeps GRPO's."""
    values = form_values({"base": "configs/quickstart.yaml"}, TrainConfig, Path())
    resolved = TrainConfig.model_validate(values).model_dump()
    values["algorithm"]["name"] = resolved["algorithm"]["name"] = "ppo"
    wanted = load_config(Path("configs/quickstart.yaml"), ["algorithm.name=ppo"])
    assert TrainConfig.model_validate(values) == wanted
    assert TrainConfig.model_validate(resolved) != wanted


def test_a_schedule_and_a_null_of_a_recipe_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule's keys are text, as in JSON; null takes a recipe's section back. Control: its neighbours stay."""
    monkeypatch.setenv("PENSTOCK_RECIPE_FOLDERS", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(
        "base: configs/quickstart.yaml\nsft: null\nrollout: {temperature: {0: 1.0, 5: 0.5}}\n"
    )
    values = form_values({"base": [str(tmp_path / "mine.yaml")]}, TrainConfig, Path("configs"))
    assert values["sft"] is None
    assert values["rollout"]["temperature"] == {"0": 1.0, "5": 0.5}
    assert TrainConfig.model_validate(values).rollout.temperature == {0: 1.0, 5: 0.5}
    assert values["rollout"]["prompts"] == 128
