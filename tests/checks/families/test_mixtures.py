"""Settings for mixtures of experts are refused for a model without experts, and replay where none can be recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks import model as checks
from penstock.checks.model import check_corrections, check_router_loss, check_routing
from penstock.configs.evaluation import evaluation_config
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import read_settings


def config(routing: str = "replay", **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"actor": {"routing": routing}, **sections})


def test_the_loss_that_has_experts_used_evenly_needs_a_mixture_whose_logits_tell_what_is_chosen(tmp_path: Path) -> None:
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


def test_replay_needs_a_mixture_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a mixture, and routes of the actor's own."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: [])
    dense, mixture = (str(write_family(name, tmp_path / name)) for name in ("Qwen 3", "Qwen 3 MoE"))
    check_routing(config(model={"path": mixture}))
    check_routing(config("own", model={"path": dense}))
    for model in ({"path": dense}, {"tiny": {}}):
        with pytest.raises(UserError, match="actor.routing=replay has no effect: the model has no experts"):
            check_routing(config(model=model))
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0])
    check_routing(config("own", model={"path": mixture}))
    with pytest.raises(UserError, match="actor.routing=replay records the rollout's experts on CPUs only"):
        check_routing(config(model={"path": mixture}))


def test_a_family_whose_routers_are_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the family among those that are."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: [])
    mixture = str(write_family("OLMoE", tmp_path / "model"))
    check_routing(config(model={"path": mixture}))
    monkeypatch.setattr(checks, "REPLAYED", ("mixtral",))
    with pytest.raises(UserError, match="routes of 'olmoe' cannot be replayed, but those of mixtral"):
        check_routing(config(model={"path": mixture}))


APART = {"actor": {"roles": ["actor"]}, "rollout": {"roles": ["rollout"]}}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("rollout.tail", {"rollout": {"tail": {}}}),
        ("rollout.carry", {"rollout": {"carry": {}}}),
        (
            "rollout.stream",
            {"rollout": {"stream": {}}, "groups": APART},
        ),
        ("environment", {"environment": {"type": "calculator"}}),
        (
            "groups.more.elastic",
            {"groups": {**APART, "more": {"roles": ["rollout"], "elastic": True, "pool": "spare"}}},
        ),
    ],
)
def test_rollouts_whose_tokens_do_not_bring_their_experts_are_refused(name: str, sections: dict[str, Any]) -> None:
    """Control: with the actor's own each of them is accepted."""
    config("own", **sections)
    with pytest.raises(ValidationError, match=f"'actor.routing: replay' does not go with '{name}'"):
        config(**sections)


def test_an_evaluation_records_no_experts(tmp_path: Path) -> None:
    """It learns from nothing."""
    trained = config(rollout={"samples": 4})
    assert trained.actor.replays
    assert not evaluation_config(trained, tmp_path, None).actor.replays
