"""The loss that has experts used evenly is refused for a model without experts, which it would not touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model import check_router_loss
from penstock.configs.schema import TrainConfig


def test_it_needs_a_mixture(tmp_path: Path) -> None:
    """Controls: a mixture, and a coefficient of 0."""

    def check(coefficient: float, **model: Any) -> None:
        algorithm = {"router_loss_coefficient": coefficient}
        check_router_loss(TrainConfig.model_validate({"model": model, "algorithm": algorithm}))

    dense, mixture = (str(write_family(name, tmp_path / name)) for name in ("Qwen 3", "Qwen 3 MoE"))
    check(0.001, path=mixture)
    check(0.0, path=dense)
    for model in ({"path": dense}, {"tiny": {}}):
        with pytest.raises(UserError, match="router_loss_coefficient has no effect: the model has no experts"):
            check(0.001, **model)
