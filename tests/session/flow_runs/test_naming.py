"""What a flow run that trains is called, before anything of it is checked."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session.flow_runs.naming import name_of


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"resume": "runs/sums-20260115-101500", "recipe": "configs/quickstart.yaml"}, "sums-20260115-101500"),
        ({"name": "mine", "recipe": "configs/quickstart.yaml"}, "mine"),
        ({"config": {"name": "mine"}, "recipe": "configs/quickstart.yaml"}, "mine"),
        ({"config": TrainConfig(name="mine")}, "mine"),
        ({"config": {"rollout": {}}, "recipe": "configs/quickstart.yaml"}, "quickstart"),
        ({"recipe": "configs/quickstart.yaml", "settings": ["seed=0,1"], "resume": None}, "quickstart"),  # a sweep's
        ({"config": None, "recipe": None}, "run"),
    ],
)
def test_a_flow_run_is_called_after_what_is_trained(parameters: dict[str, Any], name: str) -> None:
    """Also where what was given is refused later."""
    assert name_of(parameters) == name
