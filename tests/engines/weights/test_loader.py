"""vLLM's parameters are bound to storage of exactly their layout, or get storage of their own; nothing is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engines.weights.layout import flatten_in_place, ordered_parameters
from engines.weights.loader import Binding, bind, without_storage
from engines.weights.local import LocalReshard
from engines.weights.slices import shapes_of
from tests.engines.weights.modules import Attention, FusedAttention


def _bound(share: bool = True, o_rows: int = 8, flat: bool = True) -> tuple[Attention, FusedAttention, Binding]:
    ours = Attention()
    if flat:
        flatten_in_place(ordered_parameters(ours))
    with without_storage():
        theirs = FusedAttention(o_rows)
    storage = {name: parameter.data for name, parameter in ours.named_parameters()} if share else {}
    return ours, theirs, bind(theirs, shapes_of(ours), storage)


def test_binding_shares_storage_and_allocates_none_before() -> None:
    """What the trainer writes is there at once; without a flat buffer the same parts can only be copied."""
    ours, theirs, binding = _bound()
    assert (len(binding.shared), binding.copied_count) == (3, 0)
    with torch.no_grad():
        ours.k_proj.weight.fill_(3.0)
    assert torch.equal(theirs.qkv_proj.weight[8:12], torch.full((4, 8), 3.0))
    assert LocalReshard(theirs, binding, ours)() == 0
    with without_storage():
        stub = FusedAttention()
    assert stub.qkv_proj.weight.untyped_storage().nbytes() == 4
    assert nn.Linear(8, 8).weight.untyped_storage().nbytes() == 256  # only within the context
    *_, apart = _bound(flat=False)
    assert [item.name for item in apart.copied] == ["qkv_proj.weight", "qkv_proj.bias"]


def test_what_does_not_fit_is_never_bound_and_the_rest_still_shared() -> None:
    """Another dtype is copied; a size that no known layer explains is left to vLLM's own loader."""
    _, theirs, binding = _bound(o_rows=9)
    assert (binding.unmapped, binding.loose) == (("o_proj.weight",), ("o_proj.weight",))
    assert (len(binding.shared), theirs.o_proj.weight.shape) == (2, (9, 8))
    ours = Attention()
    flatten_in_place(ordered_parameters(ours))
    storage = {name: parameter.data for name, parameter in ours.named_parameters()}
    other = bind(FusedAttention().double(), shapes_of(ours), storage)
    assert (len(other.shared), other.copied_count) == (0, 3)


def test_copies_arrive_whole_and_a_moved_address_is_refused() -> None:
    """The two ways in which a rollout goes stale: a copy that was not made, and shared storage that moved."""
    ours, theirs, binding = _bound(share=False)
    reshard = LocalReshard(theirs, binding, ours)
    assert not theirs.qkv_proj.weight.any()  # control: nothing arrives by itself
    assert reshard() == sum(parameter.numel() for parameter in ours.parameters()) * 4
    stacked = torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight])
    assert torch.equal(theirs.qkv_proj.weight, stacked)
    theirs.o_proj.weight.data = theirs.o_proj.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"1 rollout parameters .* o_proj\.weight"):
        reshard()
    ours, theirs, binding = _bound()
    reshard = LocalReshard(theirs, binding, ours)
    ours.k_proj.bias.data = ours.k_proj.bias.data.clone()  # not the first part: still read through the old storage
    with pytest.raises(RuntimeError, match=r"1 rollout parameters .* qkv_proj\.bias"):
        reshard()
