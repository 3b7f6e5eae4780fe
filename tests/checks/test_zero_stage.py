"""A ZeRO stage that DeepSpeed does not start with the weights' dtype is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.configs.schema import TrainConfig
from penstock.engines.sizing.memory import GIB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with room for everything."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 * GIB)


def _config(dtype: str, **sections: Any) -> TrainConfig:
    model = {"tiny": {"max_positions": 4096}, "dtype": dtype}
    return TrainConfig.model_validate({"algorithm": {"name": "ppo"}, "model": model, **sections})


@pytest.mark.parametrize("section", ["actor", "critic", "sft"])
def test_stage_0_is_for_float32_weights(section: str) -> None:
    """The key and the way out are named. Controls: float32, which `auto` is on a CPU, and the next stage."""
    for dtype, stage in (("float32", 0), ("auto", 0), ("bfloat16", 1)):
        memory.check_memory(_config(dtype, **{section: {"zero_stage": stage}}))
    with pytest.raises(UserError, match=rf"{section}\.zero_stage=0 is for float32.*\n.*{section}\.zero_stage=1"):
        memory.check_memory(_config("bfloat16", **{section: {"zero_stage": 0}}))


def test_on_gpus_auto_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype that nobody asked for counts as one that was."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [0])
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda gpu: 64 * GIB)
    monkeypatch.setattr(memory, "has_gated_mlp", lambda gpu: False)
    memory.check_memory(_config("auto"))
    with pytest.raises(UserError, match=r"actor\.zero_stage=0"):
        memory.check_memory(_config("auto", actor={"zero_stage": 0}))


def test_training_without_rollout_names_its_own_section() -> None:
    """Only what it trains counts, whatever the other sections say."""
    config = _config("bfloat16", actor={"zero_stage": 0}, sft={"zero_stage": 1})
    memory.check_finetuning_memory(config, "trainer")
    config = _config("bfloat16", sft={"zero_stage": 0})
    with pytest.raises(UserError, match=r"trainer\.zero_stage=0"):
        memory.check_finetuning_memory(config, "trainer")


def test_for_an_optimizer_of_matrices_the_next_stage_is_no_way_out() -> None:
    """Its way out is float32. Control: for AdamW the stage is another (above)."""
    sections = {"zero_stage": 0, "optimizer": {"name": "muon"}}
    with pytest.raises(UserError, match=r"actor\.zero_stage=0 is for float32.*\n\s*set model\.dtype=float32$"):
        memory.check_memory(_config("bfloat16", actor=sections))


def test_on_a_gpu_float32_is_a_way_out_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all optimizers. Control: the next stage is one for AdamW alone."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [0])
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda gpu: 64 * GIB)
    monkeypatch.setattr(memory, "has_gated_mlp", lambda gpu: False)
    for optimizer in ("adamw", "muon"):
        with pytest.raises(UserError, match=r"actor\.zero_stage=0 is for float32") as refused:
            memory.check_memory(_config("auto", actor={"zero_stage": 0, "optimizer": {"name": optimizer}}))
        assert "model.dtype=float32" in refused.value.remedy
        assert ("actor.zero_stage=1" in refused.value.remedy) == (optimizer == "adamw")
        assert "optimizer.name" not in refused.value.remedy


@pytest.mark.parametrize("host_gib", [1, 64])
def test_what_lives_in_host_memory_has_to_fit_there(host_gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on GPUs whose host has too little is refused. Control: enough; and what moves there now and then."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [0])
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda gpu: 64 * GIB)
    monkeypatch.setattr(memory, "has_gated_mlp", lambda gpu: False)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: host_gib * GIB)
    large = {"hidden_size": 1536, "intermediate_size": 12288, "layers": 4, "max_positions": 4096}
    sections = {"model": {"tiny": large}}
    memory.check_memory(TrainConfig.model_validate(sections))
    config = TrainConfig.model_validate(sections | {"actor": {"zero_stage": 3, "offload": "optimizer"}})
    if host_gib == 64:
        (said,) = memory.describe_offload(config, memory.check_memory(config))
        assert "of the hosts' memory" in said
        return
    with pytest.raises(UserError, match="lives in host memory takes .* GiB more"):
        memory.check_memory(config)
