"""Computing in FP8 is refused where it has no effect, or where nobody has seen what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.checks.model import fp8 as checks
from penstock.configs.evaluation import evaluation_config
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.model import TinyModel
from penstock.engines.families.fp8 import refuse_model
from penstock.engines.families.shape import ExpertSizes
from penstock.engines.families.tiny import tiny_shape
from penstock.engines.ranks.models import RankModels

SETTINGS: dict[str, dict[str, Any]] = {
    "actor.fp8": {"actor": {"fp8": True}},
    "rollout.weights": {"rollout": {"weights": "fp8"}},
}
BOTH: dict[str, Any] = {"model": {"tiny": {}}, "actor": {"fp8": True}, "rollout": {"weights": "fp8"}}
MODEL = tiny_shape(TinyModel())
ELSEWHERE = {
    "groups": {"far": {"hosts": 1, "ranks": 1, "roles": ["actor", "rollout"]}},
    "hosts": {"address": "10.0.0.1"},
}


def config_with(name: str, **sections: Any) -> TrainConfig:
    return config_from_mapping({"model": {"tiny": {}}, **SETTINGS[name], **sections}, "test")


def test_only_hopper_gpus_compute_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a start. Controls: two Hopper GPUs; machines elsewhere, whose ranks look; 16 bits."""
    monkeypatch.setattr(checks, "gpu_name", lambda gpu: f"card {gpu}")
    monkeypatch.setattr(checks, "is_hopper", lambda gpu: gpu < 2)
    for gpus, why in (([], "this is a CPU"), ([0, 2], "this is a card 2"), ([0, 1], "")):
        monkeypatch.setattr(checks, "visible_gpus", lambda gpus=gpus: gpus)
        if why:
            with pytest.raises(UserError, match=f"in FP8 is for Hopper GPUs alone, and {why}"):
                checks.check_fp8(config_from_mapping(BOTH, "test"))
        else:
            checks.check_fp8(config_from_mapping(BOTH, "test"))
        checks.check_fp8(TrainConfig())
    monkeypatch.setattr(checks, "visible_gpus", list)
    checks.check_fp8(config_from_mapping(BOTH | ELSEWHERE, "test"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_on_another_gpu_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that had not joined before. Controls: on a Hopper GPU, and without the setting."""
    models = RankModels(0, 1, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match="for Hopper GPUs alone, and this is a card"):
        models.configure(config_with(name))
    models.configure(config_from_mapping({"model": {"tiny": {}}}, "test"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    models.configure(config_with(name))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_computes_in_fp8_on_both_sides_or_on_none(name: str) -> None:
    """Said before devices are looked at, with what to add. Controls: both go on to these; 16 bits."""
    (other,) = SETTINGS.keys() - {name}
    for sections in ({}, ELSEWHERE):
        with pytest.raises(UserError, match=f"{name}=(true|fp8) goes with {other}=(true|fp8)") as caught:
            checks.check_fp8(config_with(name, **sections))
        assert (caught.value.remedy or "").startswith(f"add {other}=")
    with pytest.raises(UserError, match="actor.fp8 and rollout.weights in FP8 is for Hopper GPUs alone"):
        checks.check_fp8(config_from_mapping(BOTH, "test"))
    checks.check_fp8(TrainConfig())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_was_not_compared_is_refused(name: str) -> None:
    """Controls: a plain model, and each in 16 bits."""
    cases = {
        "is a mixture of experts": replace(MODEL, experts=ExpertSizes(count=4, chosen=2, inner=32)),
        "has matrices of 200 rows or columns": replace(MODEL, intermediate_size=200),
        "has other layers than attention": replace(MODEL, parameters=2 * MODEL.parameters),
        "sees images": replace(MODEL, encoder=9),
        "has layers that carry a state": replace(MODEL, model_type="falcon_h1"),
    }
    for why, shape in cases.items():
        refuse_model(TrainConfig(), shape)
        with pytest.raises(UserError, match=f"{name}: the model {why}"):
            refuse_model(config_with(name), shape)
    refuse_model(config_with(name), MODEL)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_of_policies_that_compute_otherwise_are_corrected(name: str) -> None:
    """By importance weights unless the recipe has a section of its own. Control: in 16 bits there are none."""
    assert TrainConfig().algorithm.correction is None
    given = config_with(name).algorithm.correction
    assert given is not None
    assert (given.weights, given.cap) == ("token", 2.0)
    own = config_with(name, algorithm={"correction": {}}).algorithm.correction
    assert own is not None
    assert own.weights is None


def test_settings_that_do_not_go_with_it_are_named() -> None:
    """Float32 has no such kernels, and the parts of a cut matrix other scales. Control: these are valid alone."""
    for name in SETTINGS:
        with pytest.raises(UserError, match=f"'{name}' in FP8 does not go with 'model.dtype' float32"):
            config_with(name, model={"tiny": {}, "dtype": "float32"})
    for weights, parallel in (("auto", 2), ("fp8", 1)):
        TrainConfig.model_validate({"rollout": {"weights": weights, "tensor_parallel": parallel}})
    with pytest.raises(ValidationError, match="needs 'rollout.tensor_parallel' 1"):
        TrainConfig.model_validate({"rollout": {"weights": "fp8", "tensor_parallel": 2}})


def test_an_evaluation_by_itself_is_of_the_model_in_the_folder() -> None:
    """In 16 bits. Control: the training whose recipe it is has both settings."""
    config = config_from_mapping(BOTH, "test")
    assert config.in_fp8 == [*SETTINGS]
    assert evaluation_config(config, Path("model"), None).in_fp8 == []
