"""Which part of which Hugging Face parameter lies where in this rank's parameters of vLLM.

vLLM stacks some matrices (q, k, v; gate, up), cuts them over the ranks of an engine and pads vocabularies; each of its
layer classes does that in its own way, and only those known here are trusted. All is decided from shapes, before any
weight exists: a reshard is then a list of copies between views. Some models (Phi-3, GLM-4) come with matrices fused as
vLLM fuses them. Experts lie stacked on both sides, for engines of one rank; the table says where each one's matrix is
transposed (gpt-oss). Other transposed matrices have no counterpart, and a model with them is refused (loader.py).

A slice is a range of rows or of columns. Left out: how the values get there (the strategies beside this file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.engines.families.table import Family
from penstock.engines.weights.experts import whole_shape
from penstock.engines.weights.layout import FusedParameter, family_in, in_plan_order, plan
from penstock.engines.weights.lora import base_parameters

ROUTED = (".experts.w", ".experts.routed_experts.w")  # as vLLM 0.32 calls experts
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Slice:
    """`length` indices along `dim`, from `source` on in the Hugging Face parameter, from `target` on in vLLM's.

    Of a `transposed` one the last two dimensions change places first.
    """

    part: str
    dim: int
    source: int
    target: int
    length: int
    transposed: bool = False

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of the Hugging Face parameter."""
        return (whole.mT if self.transposed else whole).narrow(self.dim, self.source, self.length)

    def within(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of vLLM's parameter."""
        return parameter.narrow(self.dim, self.target, self.length)


@dataclass(frozen=True)
class Counterpart:
    """One parameter of vLLM as slices of Hugging Face parameters."""

    name: str
    slices: tuple[Slice, ...]


def shapes_of(lm: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every parameter whose layout vLLM shares, in plan order, also of parts.

    Adapters are left out: what vLLM holds is merged. So are transposed matrices (GPT-2's Conv1D): a square one could
    not be told from its transpose.
    """
    from transformers.pytorch_utils import Conv1D

    transposed = {name for name, module in lm.named_modules() if isinstance(module, Conv1D)}
    shapes = {
        name: whole_shape(parameter)
        for name, parameter in base_parameters(lm).items()
        if name.rpartition(".")[0] not in transposed
    }
    return in_plan_order(shapes, family_in(lm))


def counterparts(vllm_model: nn.Module, shapes: Shapes, family: Family) -> list[Counterpart]:
    """Return vLLM's parameters on this rank whose layout is known, in plan order.

    Args:
        vllm_model: its parameters may still be without storage; only shapes and layer attributes are read.
        shapes: whole shapes of the Hugging Face parameters by name.
    """
    theirs, found = dict(vllm_model.named_parameters()), []
    for fused in _as_served(plan(shapes, family), theirs):
        if fused.name not in theirs or not all(shapes[part] for part in fused.parts):
            continue
        layer = vllm_model.get_submodule(fused.name.rpartition(".")[0])
        slices = _slices(layer, fused, theirs[fused.name].shape, {part: shapes[part] for part in fused.parts}, family)
        if slices is not None:
            found.append(Counterpart(fused.name, slices))
    return found


def _as_served(planned: list[FusedParameter], theirs: Mapping[str, Any]) -> Iterator[FusedParameter]:
    """Yield what vLLM fuses, and the parts one by one where this vLLM leaves a model's layers as they are."""
    for fused in planned:
        if (deeper := fused.name.replace(*ROUTED)) in theirs:
            yield FusedParameter(deeper, fused.parts)
        elif fused.name in theirs or not theirs.keys() >= {*fused.parts}:
            yield fused
        else:
            yield from (FusedParameter(part, (part,)) for part in fused.parts)


def _slices(
    layer: nn.Module, fused: FusedParameter, target: torch.Size, shapes: Shapes, family: Family
) -> tuple[Slice, ...] | None:
    """Return the slices of one parameter of `layer`; None if the class or a size is not what is known here.

    Args:
        shapes: those of its parts.
    """
    ranges = list(_ranges(layer, fused, list(shapes.values()), family))
    if {number for number, *_ in ranges} != {*range(len(fused.parts))}:
        return None
    slices, filled = [], 0
    for number, dim, source, length in ranges:
        part = fused.parts[number]
        whole, transposed = tuple(shapes[part]), part.endswith(family.transposed)
        if transposed:
            whole = (*whole[:-2], whole[-1], whole[-2])
        fits = len(whole) == len(target) and all(
            size == target[other] for other, size in enumerate(whole) if other != dim
        )
        if not fits or source + length > whole[dim]:
            return None
        slices.append(Slice(part, dim, source, filled, length, transposed))
        filled += length
    dim = ranges[0][1]
    return tuple(slices) if filled == target[dim] or _padded(layer) and filled < target[dim] else None


def _ranges(
    layer: nn.Module, fused: FusedParameter, wholes: list[Sequence[int]], family: Family
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number of the part, dim, first index, length) on this rank; a part that is fused already gives several.

    A layer class that is not known gives none.
    """
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kind, weight, rows = type(layer), not fused.name.endswith(".bias"), [whole[0] for whole in wholes]
    owner: Any = layer
    if kind is linear.QKVParallelLinear:
        yield from _stretches(rows, _heads(layer), _stacked(fused, family))
    elif kind is linear.MergedColumnParallelLinear:
        held = [_share(layer, size) for size in owner.output_sizes]
        yield from _stretches(rows, held, _stacked(fused, family))
    elif kind is linear.ColumnParallelLinear:
        yield from ((part, 0, *_share(layer, count)[1:]) for part, count in enumerate(rows))
    elif kind is linear.RowParallelLinear and weight:
        yield from ((part, 1, *_share(layer, whole[1])[1:]) for part, whole in enumerate(wholes))
    elif kind in (VocabParallelEmbedding, ParallelLMHead):
        indices = owner.shard_indices
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        yield from ((part, 0, first, end - first) for part, count in enumerate(rows) if count == owner.org_vocab_size)
    elif (
        isinstance(layer, linear.ReplicatedLinear)
        or kind is linear.RowParallelLinear
        or not isinstance(layer, linear.LinearBase)
    ):
        yield from ((part, 0, 0, count) for part, count in enumerate(rows))


def _share(layer: Any, whole: int) -> tuple[int, int, int]:
    """Return (all, first, length) of this rank's rows or columns, where `whole` of them are cut evenly."""
    length = whole // int(layer.tp_size)
    return whole, int(layer.tp_rank) * length, length


def _heads(layer: Any) -> list[tuple[int, int, int]]:
    """Return (all, first, length) of the rows of queries, keys and values that this rank holds.

    With more ranks than key/value heads several ranks hold the same ones.
    """
    group, held = layer.tp_rank // layer.num_kv_head_replicas, [_share(layer, layer.total_num_heads * layer.head_size)]
    for size in (layer.head_size, getattr(layer, "v_head_size", layer.head_size)):
        length = layer.num_kv_heads * size
        held.append((layer.total_num_kv_heads * size, group * length, length))
    return held


def _stacked(fused: FusedParameter, family: Family) -> bool:
    """Whether the rows of one matrix are in vLLM's order.

    They are if it has vLLM's name, or if a row of the table says so: under another name a model may order them
    otherwise.
    """
    return fused.name.split(".")[-2] in (family.query_key_value.served, family.gate_up.served, *family.stacked)


def _stretches(rows: list[int], held: list[tuple[int, int, int]], stacked: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number of the part, dim, first, length) of a rank's share of each matrix that vLLM stacks.

    Hugging Face has them apart, or `stacked` as one or as a few. None if the sizes do not fit.
    """
    sizes = [whole for whole, _, _ in held]
    starts = _starts(rows, sizes) if rows == sizes or stacked else []
    if not starts:
        return
    for (part, start), (_, first, length) in zip(starts, held, strict=True):
        yield part, 0, start + first, length


def _starts(rows: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return in which part each of these matrices lies, and at which row; none if parts hold others."""
    found, part, start = [], 0, 0
    for size in sizes:
        if part == len(rows) or start + size > rows[part]:
            return []
        found.append((part, start))
        start += size
        if start == rows[part]:
            part, start = part + 1, 0
    return found if part == len(rows) else []


def _padded(layer: nn.Module) -> bool:
    """Whether vLLM may have more rows than there are tokens; they are zero and no sampled token comes from them."""
    return hasattr(layer, "shard_indices")
