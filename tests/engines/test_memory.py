"""The memory estimate counts what the files say and shards it as ZeRO does; the rest of it is an allowance.

Hand values are in bytes per parameter: bfloat16 weights 2, gradients 4 (accumulated in float32), masters 4, AdamW's
moments 8.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import TrainConfig
from engines.memory import GIB, ModelShape, rank_bytes, read_shape
from engines.models import load_causal_lm
from tests.engines.ranks import Shape

MILLION = ModelShape(
    parameters=1_000_000,
    layers=2,
    hidden_size=128,
    intermediate_size=96,
    kv_heads=2,
    head_size=32,
    vocabulary=64,
    positions=128,
)


def _bytes(ranks: int, device: str = "cuda", roles: tuple[str, ...] = ("actor",), **sections: Any) -> dict[str, int]:
    return rank_bytes(TrainConfig(**sections), MILLION, roles, ranks, device)


def _actor(stage: int, ranks: int, **sections: Any) -> float:
    """Bytes per parameter of the actor on one rank."""
    parts = _bytes(ranks, actor={"zero_stage": stage}, **sections)
    return parts["actor weights and optimizer"] / MILLION.parameters


SHAPES = [Shape("qwen2", tied=True), Shape("llama", tied=False, vocabulary=100)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_the_files_headers_tell_the_models_size(shape: Shape, folder_of: Callable[[Shape], Path]) -> None:
    """No weight is loaded, and the count is the model's own: biases in, tied embeddings once."""
    folder = folder_of(shape)
    read = read_shape(folder)
    lm = load_causal_lm(folder, torch.float32, False)
    assert read.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert read.vocabulary == shape.vocabulary
    assert (read.layers, read.hidden_size, read.intermediate_size) == (2, 128, 96)
    assert (read.kv_heads, read.head_size, read.positions) == (2, 32, 512)


def test_a_model_in_several_files_is_counted_whole(tmp_path: Path, folder_of: Callable[[Shape], Path]) -> None:
    """Large models come in shards: every file counts."""
    folder = folder_of(Shape("qwen3", tied=False))
    lm = load_causal_lm(folder, torch.float32, False)
    lm.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read_shape(tmp_path) == read_shape(folder)


def test_each_zero_stage_shards_what_it_says() -> None:
    """Stage 1 the optimizer, stage 2 the gradients too, stage 3 the weights too; stage 0 nothing."""
    assert [_actor(stage, ranks=1) for stage in range(4)] == [18.0, 18.0, 18.0, 18.0]
    assert [_actor(stage, ranks=4) for stage in range(4)] == [18.0, 9.0, 6.0, 4.5]


def test_float32_weights_are_twice_as_large_and_need_masters_only_where_they_are_sharded() -> None:
    """On the CPU weights are float32: at stage 0 the optimizer steps them themselves."""
    wide = {"model": {"dtype": "float32"}}
    assert _actor(0, 1, **wide) == 16.0
    assert _actor(2, 1, **wide) == 20.0
    assert _bytes(1, "cpu", actor={"zero_stage": 0})["actor weights and optimizer"] == 16_000_000


def test_a_role_costs_where_it_lives() -> None:
    """The reference is one more copy of the weights; ZeRO-3 cannot share with the rollout, so that is another."""
    everything = _bytes(1, roles=("actor", "reference", "rollout"), algorithm={"kl": {}})
    assert everything["reference"] == 2_000_000
    assert "rollout weights" not in _bytes(1, roles=("actor", "rollout"))
    assert _bytes(2, roles=("actor", "rollout"), actor={"zero_stage": 3})["rollout weights"] == 2_000_000
    ppo = _bytes(1, roles=("actor", "critic"), algorithm={"name": "ppo"})
    assert ppo["critic weights and optimizer"] == ppo["actor weights and optimizer"]


def test_activations_grow_with_the_micro_batch_and_shrink_with_recomputation() -> None:
    """The micro-batch budget is the knob that a refusal tells the user to turn."""
    small, large = (_bytes(1, actor={"micro_batch_tokens": tokens})["activations"] for tokens in (1024, 4096))
    assert large == 4 * small
    recomputed = {"micro_batch_tokens": 4096, "gradient_checkpointing": True}
    assert _bytes(1, actor=recomputed)["activations"] < large


def test_the_kv_cache_is_what_was_asked_for_or_the_least_that_is_useful() -> None:
    """Keys and values of 16 sequences at full length: 2 x 2 layers x 2 heads x 32 x 2 bytes per token."""
    rollout = {"max_response_tokens": 100}
    data = {"max_prompt_tokens": 28}
    assert _bytes(1, roles=("actor", "rollout"), rollout=rollout, data=data)["KV cache"] == 16 * 128 * 512
    asked = _bytes(1, roles=("actor", "rollout"), rollout={**rollout, "kv_cache_gib": 0.5}, data=data)
    assert asked["KV cache"] == GIB // 2
