"""An optimizer whose package is missing is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import optimizers
from penstock.checks.model.starting_model import check_model
from penstock.configs.evaluation import evaluation_config
from penstock.configs.schema import TrainConfig


@pytest.mark.parametrize("role", ["actor", "critic", "sft"])
def test_an_optimizer_whose_package_is_not_installed_is_refused(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it. Controls: it is installed; the optimizer is torch's; nothing is trained."""
    sections: dict[str, Any] = {"model": {"tiny": {}}, "algorithm": {"name": "ppo"}}
    eight = {"zero_stage": 0, "optimizer": {"name": "adamw8bit"}}
    config = TrainConfig.model_validate(sections | {role: eight})
    check_model(config)
    monkeypatch.setattr(optimizers, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="adamw8bit needs the package bitsandbytes") as refused:
        check_model(config)
    assert "pip install 'bitsandbytes>=0.50'" in refused.value.remedy
    check_model(TrainConfig.model_validate(sections))
    check_model(evaluation_config(config, Path(), None).model_copy(update={"model": config.model}))
