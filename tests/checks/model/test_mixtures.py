"""Settings for mixtures of experts are refused for a model without experts, and replay where none can be recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model import mixtures
from penstock.checks.model.mixtures import check_corrections, check_exact_shards, check_router_loss, check_routing
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


def test_corrections_are_refused_where_bfloat16_would_round_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, and on their way to another group, on GPUs as well. Controls: float32, and no corrections."""
    plain, corrected = (write_family(name, tmp_path / name) for name in ("Qwen 3 MoE", "GLM-4.5"))

    def check(folder: Path, dtype: str, **sections: Any) -> None:
        config = TrainConfig.model_validate({"model": {"path": str(folder), "dtype": dtype}, **sections})
        check_corrections(config, read_settings(folder))

    apart = {"groups": {"one": {"roles": ["actor"]}, "two": {"roles": ["rollout"]}}}
    for gpus in ([], [0]):
        monkeypatch.setattr(mixtures, "visible_gpus", lambda gpus=gpus: gpus)
        check(corrected, "bfloat16")
        for sections in ({"actor": {"zero_stage": 3}}, apart):
            check(corrected, "float32", **sections)
            check(plain, "bfloat16", **sections)
            with pytest.raises(UserError, match="routers of glm4_moe .* would be rounded on their way to vLLM"):
                check(corrected, "bfloat16", **sections)


@pytest.mark.parametrize("section", ["actor", "sft"])
def test_shards_that_round_corrections_are_refused(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever is trained. Controls: stage 2, float32, no corrections, and an evaluation, which trains nothing."""
    plain, corrected = (write_family(name, tmp_path / name) for name in ("Qwen 3 MoE", "GLM-4.5"))

    def of(folder: Path, dtype: str, stage: int) -> TrainConfig:
        model = {"path": str(folder), "dtype": dtype}
        return TrainConfig.model_validate({"model": model, section: {"zero_stage": stage}})

    for gpus in ([], [0]):
        monkeypatch.setattr(mixtures, "visible_gpus", lambda gpus=gpus: gpus)
        for folder, dtype, stage in ((plain, "bfloat16", 3), (corrected, "float32", 3), (corrected, "bfloat16", 2)):
            check_exact_shards(of(folder, dtype, stage))
        check_exact_shards(evaluation_config(of(corrected, "bfloat16", 3), corrected, None))
        with pytest.raises(UserError, match="zero_stage 3: routers of the model .* correct their choice") as refused:
            check_exact_shards(of(corrected, "bfloat16", 3))
        assert "float32" in refused.value.remedy


def test_replay_needs_a_mixture(tmp_path: Path) -> None:
    """Controls: a mixture, and routes of the actor's own."""
    dense, mixture = (str(write_family(name, tmp_path / name)) for name in ("Qwen 3", "Qwen 3 MoE"))
    check_routing(config(model={"path": mixture}))
    check_routing(config("own", model={"path": dense}))
    for model in ({"path": dense}, {"tiny": {}}):
        with pytest.raises(UserError, match="actor.routing=replay has no effect: the model has no experts"):
            check_routing(config(model=model))


def test_a_family_whose_routers_are_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the family among those that are."""
    mixture = str(write_family("OLMoE", tmp_path / "model"))
    check_routing(config(model={"path": mixture}))
    monkeypatch.setattr(mixtures, "REPLAYED", ("mixtral",))
    with pytest.raises(UserError, match="routes of 'olmoe' cannot be replayed, but those of mixtral"):
        check_routing(config(model={"path": mixture}))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("zero_stage 0", {"zero_stage": 0}),
        ("zero_stage 3", {"zero_stage": 3}),
        ("lora", {"lora": {}}),
        ("offload_optimizer", {"zero_stage": 2, "offload_optimizer": True}),
    ],
)
def test_what_nobody_has_compared_of_experts_on_several_ranks_is_refused(name: str, given: dict[str, Any]) -> None:
    """Controls: each without it, and it at stages 1 and 2."""
    TrainConfig.model_validate({"actor": given})
    for stage in (1, 2):
        TrainConfig.model_validate({"actor": {"zero_stage": stage, "expert_parallel": 2}})
    with pytest.raises(ValidationError, match=f"'expert_parallel' 2 does not go with '{name}'"):
        TrainConfig.model_validate({"actor": {**given, "expert_parallel": 2}})


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


def test_an_evaluation_shares_out_no_experts(tmp_path: Path) -> None:
    """It trains none. Control: the training does."""
    trained = TrainConfig.model_validate({"model": {"path": str(tmp_path)}, "actor": {"expert_parallel": 2}})
    assert trained.actor.expert_parallel == 2
    assert evaluation_config(trained, tmp_path, None).actor.expert_parallel == 1
