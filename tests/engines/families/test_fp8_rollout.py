"""Rollouts in FP8 are refused where they would have no effect, and where nobody has shown that they are near."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.checks import training
from penstock.configs.evaluation import evaluation_config
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.model import TinyModel
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.families import fp8_rollout
from penstock.engines.families.fp8_rollout import refuse_model
from penstock.engines.families.shape import ExpertSizes
from penstock.engines.families.tiny import tiny_shape
from penstock.engines.ranks.models import RankModels

KINDS = ("kv_cache_dtype", "weights")
MODEL = tiny_shape(TinyModel())


def config_with(kind: str, **sections: Any) -> TrainConfig:
    return config_from_mapping({"model": {"tiny": {}}, "rollout": {kind: "fp8"}, **sections}, "test")


@pytest.mark.parametrize("kind", KINDS)
def test_only_hopper_gpus_compute_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a start and by each rank. Controls: two Hopper GPUs; machines elsewhere, whose ranks look; 16 bits."""
    monkeypatch.setattr(fp8_rollout, "SEEN_ON_GPUS", KINDS)
    monkeypatch.setattr(training, "gpu_name", lambda gpu: f"card {gpu}")
    monkeypatch.setattr(training, "is_hopper", lambda gpu: gpu < 2)
    for gpus, why in (([], "rollouts are on a CPU"), ([0, 2], "rollouts are on a card 2"), ([0, 1], "")):
        monkeypatch.setattr(training, "visible_gpus", lambda gpus=gpus: gpus)
        if why:
            with pytest.raises(UserError, match=f"rollout.{kind}=fp8 is for Hopper GPUs alone, and {why}"):
                training.check_fp8(config_with(kind))
        else:
            training.check_fp8(config_with(kind))
        training.check_fp8(TrainConfig())
    elsewhere = {"far": {"hosts": 1, "ranks": 1, "roles": ["actor", "rollout"]}}
    monkeypatch.setattr(training, "visible_gpus", list)
    training.check_fp8(config_with(kind, groups=elsewhere, hosts={"address": "10.0.0.1"}))
    rank = RankModels(0, 1, torch.device("cpu"), config=config_with(kind), shapes={"actor": MODEL})
    with pytest.raises(UserError, match="rollouts are on a CPU"):
        rank.refuse_fp8()
    replace(rank, fp8_anywhere=True).refuse_fp8()
    replace(rank, config=TrainConfig()).refuse_fp8()


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_has_compared_on_a_gpu_is_no_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before devices are looked at, also where the other setting was compared. Control: rollouts in 16 bits."""
    monkeypatch.setattr(fp8_rollout, "SEEN_ON_GPUS", tuple(other for other in KINDS if other != kind))
    with pytest.raises(UserError, match=f"rollout.{kind}=fp8: nobody has compared"):
        training.check_fp8(config_with(kind))
    training.check_fp8(TrainConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_not_compared_is_refused(kind: str) -> None:
    """Mixtures and sizes are about products alone. Controls: a plain model, and each of them in 16 bits."""
    mixture = replace(MODEL, experts=ExpertSizes(count=4, chosen=2, inner=32))
    odd = replace(MODEL, intermediate_size=200)
    cases = {
        "is a mixture of experts": (mixture, kind == "weights"),
        "has matrices of 200 rows or columns": (odd, kind == "weights"),
        "sees images": (replace(MODEL, encoder=9), True),
        "has layers that carry a state": (replace(MODEL, model_type="falcon_h1"), True),
    }
    for why, (shape, refused) in cases.items():
        refuse_model(RolloutConfig(), shape)
        if refused:
            with pytest.raises(UserError, match=f"rollout.{kind}=fp8: the model {why}"):
                refuse_model(RolloutConfig.model_validate({kind: "fp8"}), shape)
        else:
            refuse_model(RolloutConfig.model_validate({kind: "fp8"}), shape)
    refuse_model(RolloutConfig.model_validate({kind: "fp8"}), MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_such_rollouts_are_corrected(kind: str) -> None:
    """By importance weights unless the recipe has a section of its own. Control: rollouts in 16 bits have none."""
    assert TrainConfig().algorithm.correction is None
    given = config_with(kind).algorithm.correction
    assert given is not None
    assert (given.weights, given.cap) == ("token", 2.0)
    own = config_with(kind, algorithm={"correction": {}}).algorithm.correction
    assert own is not None
    assert own.weights is None


def test_settings_that_do_not_go_with_it_are_named() -> None:
    """Float32 has no such kernels, and the parts of a cut matrix other scales. Control: a cut cache is as the whole."""
    for kind in KINDS:
        with pytest.raises(UserError, match=f"'rollout.{kind}' fp8 does not go with 'model.dtype' float32"):
            config_with(kind, model={"tiny": {}, "dtype": "float32"})
    spread = {"tensor_parallel": 2}
    with pytest.raises(ValidationError, match="needs 'rollout.tensor_parallel' 1"):
        TrainConfig.model_validate({"rollout": {"weights": "fp8", **spread}})
    TrainConfig.model_validate({"rollout": {"kv_cache_dtype": "fp8", **spread}})


def test_an_evaluation_by_itself_is_of_the_model_in_the_folder() -> None:
    config = TrainConfig.model_validate({"rollout": dict.fromkeys(KINDS, "fp8")})
    assert config.rollout.in_fp8 == [*KINDS]
    assert evaluation_config(config, Path("model"), None).rollout.in_fp8 == []
