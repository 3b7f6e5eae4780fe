"""`actor.fp8` is refused where it has no effect, or where nobody has seen what it does."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import model as checks
from penstock.configs.loading.load import config_from_mapping
from penstock.engines.families import fp8
from penstock.engines.families.shape import ModelShape
from penstock.engines.ranks.models import RankModels

ELSEWHERE = {
    "groups": {"far": {"hosts": 1, "ranks": 1, "roles": ["actor", "rollout"]}},
    "hosts": {"address": "10.0.0.1"},
}


def checked(wanted: bool = True, dtype: str = "auto", **sections: Any) -> None:
    tree = {"model": {"tiny": {}, "dtype": dtype}, "actor": {"fp8": wanted}, **sections}
    checks.check_fp8(config_from_mapping(tree, "test"))


def on_hopper(monkeypatch: pytest.MonkeyPatch, hopper: bool = True, shown: bool = True) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0, 1])
    monkeypatch.setattr(checks, "is_hopper", lambda gpu: hopper or gpu == 0)
    monkeypatch.setattr(fp8, "SHOWN_ON_GPUS", shown)


def test_it_needs_hopper_gpus_and_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: without the setting nothing is refused, and on shown Hopper GPUs it is not either."""
    monkeypatch.setattr(checks, "visible_gpus", list)
    with pytest.raises(UserError, match="for Hopper GPUs"):
        checked()
    checked(wanted=False)
    on_hopper(monkeypatch, hopper=False)
    with pytest.raises(UserError, match="for Hopper GPUs"):
        checked()
    on_hopper(monkeypatch, shown=False)
    for sections in ({}, ELSEWHERE):
        with pytest.raises(UserError, match="nobody has compared"):
            checked(**sections)
    on_hopper(monkeypatch)
    checked()
    monkeypatch.setattr(checks, "visible_gpus", list)
    checked(**ELSEWHERE)  # its ranks say it


def test_float32_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: bfloat16."""
    on_hopper(monkeypatch)
    with pytest.raises(UserError, match="for bfloat16 weights, and model.dtype is float32"):
        checked(dtype="float32")
    checked(dtype="bfloat16")


def test_models_with_other_layers_and_odd_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a dense decoder whose sizes are multiples of 16, the tiny model's by default among them."""
    on_hopper(monkeypatch)
    with pytest.raises(UserError, match="the sizes of gate_proj are no multiples of 16"):
        checked(model={"tiny": {"intermediate_size": 100}})
    sizes = {"heads": 2, "kv_heads": 2, "head_size": 16, "positions": 9, "vocabulary": 64}
    dense = ModelShape(4096 + 4 * 1024 + 3 * 32 * 64, 1, 32, 64, **sizes)
    assert fp8.without_fp8(dense) is None
    other = ModelShape(2 * dense.parameters, 1, 32, 64, **sizes)
    assert "other layers than attention and gated MLPs" in str(fp8.without_fp8(other))


def test_a_rank_on_another_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that had not joined before. Controls: on a Hopper GPU, and without the setting."""
    import torch

    config = config_from_mapping({"model": {"tiny": {}}, "actor": {"fp8": True}}, "test")
    models = RankModels(0, 1, torch.device("cuda"))
    for capability, refused in (((8, 0), True), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        if refused:
            with pytest.raises(UserError, match="for Hopper GPUs"):
                models.configure(config)
            continue
        models.configure(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    models.configure(config_from_mapping({"model": {"tiny": {}}}, "test"))
