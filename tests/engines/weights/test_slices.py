"""Slices put exactly the values into vLLM's parameters that vLLM's own loaders put there, on every rank.

The oracle is vLLM: its real layer classes, each built as one rank of an engine of several, load whole Hugging Face
matrices by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from penstock.engines.families.table import USUAL, Family, family_of
from penstock.engines.weights.slices import counterparts

HIDDEN = 16


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """Lets vLLM's layers believe that they are built on one rank of an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    place = SimpleNamespace(rank_in_group=0, world_size=1)
    with (
        patch.dict(os.environ),
        patch.object(parallel_state, "_TP", place),
        set_current_vllm_config(VllmConfig()),
    ):
        yield lambda rank, ranks: place.__dict__.update(rank_in_group=rank, world_size=ranks)


def _expect_as_loaded(
    name: str, layer: Any, wholes: dict[str, torch.Tensor], shards: list[Any], family: Family = USUAL
) -> None:
    """Compare slices with the layer's own weight loader, for its weight and, if it has one, its bias."""
    model = nn.ModuleDict({name: layer})
    found = counterparts(model, {part: whole.shape for part, whole in wholes.items()}, family)
    assert [item.name for item in found] == [key for key, _ in model.named_parameters()]
    for item in found:
        parameter = dict(model.named_parameters())[item.name]
        leaf = item.name.rpartition(".")[2]
        parts = [whole for part, whole in wholes.items() if part.endswith(f".{leaf}")]
        parameter.data.zero_()
        for part, shard in zip(parts, shards, strict=True):
            arguments = () if shard is None else (shard,)
            parameter.weight_loader(parameter, part, *arguments)  # without a shard: what is stacked it takes apart
        loaded = parameter.data.clone()
        parameter.data.zero_()
        for piece in item.slices:
            piece.within(parameter.data).copy_(piece.of(wholes[piece.part]))
        assert loaded.any()
        assert torch.equal(parameter.data, loaded)


def _matrices(rows: dict[str, int], columns: int = HIDDEN, bias: bool = False) -> dict[str, torch.Tensor]:
    wholes = {f"{name}.weight": torch.randn(count, columns) for name, count in rows.items()}
    return wholes | ({f"{name}.bias": torch.randn(count) for name, count in rows.items()} if bias else {})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(4, 4, 1), (4, 2, 2), (4, 4, 2), (8, 2, 4), (4, 1, 2), (8, 2, 8), (8, 4, 2)],
    ids=lambda value: str(value),
)
def test_attention_heads_go_to_their_ranks(heads: int, kv_heads: int, ranks: int, as_rank: Any) -> None:
    """Grouped queries, and more ranks than key/value heads: several ranks then hold the same ones."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    wholes = _matrices({"q_proj": heads * 4, "k_proj": kv_heads * 4, "v_proj": kv_heads * 4}, bias=True)
    for rank in range(ranks):
        as_rank(rank, ranks)
        layer = QKVParallelLinear(HIDDEN, 4, heads, kv_heads, bias=True)
        _expect_as_loaded("qkv_proj", layer, wholes, ["q", "k", "v"])


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 1), (2, 2), (4, 2), (2, 4), (1, 4)])
def test_matrices_that_come_stacked_are_taken_apart(kv_heads: int, ranks: int, as_rank: Any) -> None:
    """Phi-3 stores queries, keys and values as one, GLM-4 gate and up: each rank's rows are several stretches of it."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    for rank in range(ranks):
        as_rank(rank, ranks)
        layer = QKVParallelLinear(HIDDEN, 4, 8, kv_heads, bias=True)
        _expect_as_loaded("qkv_proj", layer, _matrices({"qkv_proj": (8 + 2 * kv_heads) * 4}, bias=True), [None])
        gate_up = MergedColumnParallelLinear(HIDDEN, [24, 24], bias=True)
        _expect_as_loaded("gate_up_proj", gate_up, _matrices({"gate_up_proj": 48}, bias=True), [None])


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_that_come_stacked_in_part_are_taken_apart(ranks: int, as_rank: Any) -> None:
    """Qwen3.5 stores queries, keys and values as one, and the gate by itself. Control: by no row it is not known."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    wholes = _matrices({"in_proj_qkv": 8 + 8 + 16, "in_proj_z": 16})
    for rank in range(ranks):
        as_rank(rank, ranks)
        layer = MergedColumnParallelLinear(HIDDEN, [8, 8, 16, 16], bias=False)
        _expect_as_loaded("in_proj_qkvz", layer, wholes, [(0, 1, 2), 3], family_of("qwen3_5_text"))
        shapes = {part: whole.shape for part, whole in wholes.items()}
        assert counterparts(nn.ModuleDict({"in_proj_qkvz": layer}), shapes, USUAL) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mlp_is_cut_by_rows_and_by_columns(ranks: int, as_rank: Any) -> None:
    """Gate and up each give every rank its rows; down gives its columns and keeps its bias whole."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    for rank in range(ranks):
        as_rank(rank, ranks)
        gate_up = MergedColumnParallelLinear(HIDDEN, [24, 24], bias=True)
        _expect_as_loaded("gate_up_proj", gate_up, _matrices({"gate_proj": 24, "up_proj": 24}, bias=True), [0, 1])
        down = RowParallelLinear(24, HIDDEN, bias=True)
        _expect_as_loaded("down_proj", down, _matrices({"down_proj": HIDDEN}, 24, bias=True), [None])


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_linear_layers(ranks: int, as_rank: Any) -> None:
    """A matrix cut by rows alone, and one that every rank holds."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear

    for rank in range(ranks):
        as_rank(rank, ranks)
        wholes = _matrices({"dense": 12}, bias=True)
        _expect_as_loaded("dense", ColumnParallelLinear(HIDDEN, 12, bias=True), wholes, [None])
        _expect_as_loaded("dense", ReplicatedLinear(HIDDEN, 12, bias=True), wholes, [None])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [64, 100, 130])
def test_vocabularies_are_padded_and_cut(vocabulary: int, ranks: int, as_rank: Any) -> None:
    """To multiples of 64: the last ranks may hold few tokens or none, and what is no token stays zero."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    for rank in range(ranks):
        as_rank(rank, ranks)
        for name, kind in (("embed_tokens", VocabParallelEmbedding), ("lm_head", ParallelLMHead)):
            wholes = _matrices({name: vocabulary})
            layer = kind(vocabulary, HIDDEN)
            if rank * layer.num_embeddings_per_partition < vocabulary:
                _expect_as_loaded(name, layer, wholes, [None])
                continue
            shapes = {key: whole.shape for key, whole in wholes.items()}
            (item,) = counterparts(nn.ModuleDict({name: layer}), shapes, USUAL)
            assert [piece.length for piece in item.slices] == [0]


def test_layers_that_vllm_leaves_apart_have_counterparts_one_by_one(as_rank: Any) -> None:
    """As in models that it builds from another library's classes. Control: where one is missing none is known."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    layers = {name: ColumnParallelLinear(HIDDEN, count, bias=False) for name, count in rows.items()}
    shapes = {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    found = counterparts(nn.ModuleDict(layers), shapes, USUAL)
    assert [(item.name, [piece.part for piece in item.slices]) for item in found] == [(name, [name]) for name in shapes]
    del layers["v_proj"]
    assert counterparts(nn.ModuleDict(layers), shapes, USUAL) == []


def test_what_is_not_known_has_no_counterpart(as_rank: Any) -> None:
    """Matrices stacked under a model's own name, sizes that do not match, layers of another class."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    class Interleaved(QKVParallelLinear):
        """A model's own order of rows."""

    parts = {"q_proj.weight": (16, HIDDEN), "k_proj.weight": (8, HIDDEN), "v_proj.weight": (8, HIDDEN)}

    def known(layer: nn.Module, shapes: dict[str, tuple[int, ...]], name: str = "qkv_proj") -> int:
        return len(counterparts(nn.ModuleDict({name: layer}), shapes, USUAL))

    assert known(QKVParallelLinear(HIDDEN, 4, 4, 2, bias=False), parts) == 1
    assert known(Interleaved(HIDDEN, 4, 4, 2, bias=False), parts) == 0
    stacked = {"query_key_value.weight": (32, HIDDEN)}
    assert known(QKVParallelLinear(HIDDEN, 4, 4, 2, bias=False), stacked, "query_key_value") == 0
    assert known(QKVParallelLinear(HIDDEN, 4, 4, 2, bias=False), {"qkv_proj.weight": (31, HIDDEN)}) == 0
    gate_up = {"gate_proj.weight": (24, HIDDEN), "up_proj.weight": (8, HIDDEN)}
    assert known(MergedColumnParallelLinear(HIDDEN, [24, 8], bias=False), gate_up, "gate_up_proj") == 1
    assert known(MergedColumnParallelLinear(HIDDEN, [16, 16], bias=False), gate_up, "gate_up_proj") == 0
    assert known(QKVParallelLinear(HIDDEN, 4, 4, 4, bias=False), parts) == 0
    assert known(VocabParallelEmbedding(64, HIDDEN), {"embed.weight": (60, HIDDEN)}, "embed") == 0
    assert known(nn.LayerNorm(HIDDEN), {"norm.weight": (HIDDEN,)}, "norm") == 1
    assert known(nn.LayerNorm(HIDDEN), {"norm.weight": (HIDDEN + 1,)}, "norm") == 0


def test_experts_that_vllm_has_transposed_are_written_so() -> None:
    """Square ones, too, whose sizes tell nothing. Control: by a row that does not say so they are another matrix."""
    name = "model.layers.0.mlp.experts"
    model = nn.Module()
    model.register_parameter("w2_weight", nn.Parameter(torch.zeros(2, HIDDEN, HIDDEN)))
    served = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})})
    served.get_submodule("model.layers.0").add_module("mlp", nn.ModuleDict({"experts": model}))
    whole = torch.randn(2, HIDDEN, HIDDEN)
    for row, expected in ((family_of("gpt_oss"), whole.mT), (family_of("qwen3_moe"), whole)):
        (found,) = counterparts(served, {f"{name}.down_proj": whole.shape}, row)
        (piece,) = found.slices
        assert torch.equal(piece.of(whole), expected) and piece.transposed == (row is family_of("gpt_oss"))
