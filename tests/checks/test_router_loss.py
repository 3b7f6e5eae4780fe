"""The loss that has experts used evenly is refused where it would touch none, or not those that are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model import check_corrections, check_router_loss
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import read_settings


def test_it_needs_a_mixture_whose_logits_tell_what_is_chosen(tmp_path: Path) -> None:
    """Controls: a mixture, and a coefficient of 0."""

    def check(coefficient: float, **model: Any) -> None:
        algorithm = {"router_loss_coefficient": coefficient}
        check_router_loss(TrainConfig.model_validate({"model": model, "algorithm": algorithm}))

    families = ("Qwen 3", "Qwen 3 MoE", "GLM-4.5")
    dense, mixture, corrected = (str(write_family(name, tmp_path / name)) for name in families)
    check(0.001, path=mixture)
    check(0.0, path=dense)
    for model in ({"path": dense}, {"tiny": {}}):
        with pytest.raises(UserError, match="router_loss_coefficient has no effect: the model has no experts"):
            check(0.001, **model)
    check(0.0, path=corrected)
    with pytest.raises(UserError, match="those of glm4_moe correct their choice"):
        check(0.001, path=corrected)


def test_corrections_are_refused_in_bfloat16(tmp_path: Path) -> None:
    """vLLM has them in float32. Controls: float32, and a mixture that corrects nothing."""
    plain, corrected = (write_family(name, tmp_path / name) for name in ("Qwen 3 MoE", "GLM-4.5"))

    def check(folder: Path, dtype: str) -> None:
        config = TrainConfig.model_validate({"model": {"path": str(folder), "dtype": dtype}})
        check_corrections(config, read_settings(folder))

    check(corrected, "float32")
    check(plain, "bfloat16")
    with pytest.raises(UserError, match="routers of glm4_moe correct their choice of experts in float32"):
        check(corrected, "bfloat16")
