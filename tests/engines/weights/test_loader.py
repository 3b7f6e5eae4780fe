"""vLLM's parameters are bound to storage of exactly their layout, or get storage of their own; nothing is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import UserError
from penstock.engines.families.table import USUAL
from penstock.engines.weights.copies import Copies
from penstock.engines.weights.layout import flatten_in_place, ordered_parameters
from penstock.engines.weights.loader import Binding, bind, held, without_storage
from penstock.engines.weights.local import LocalReshard
from penstock.engines.weights.slices import shapes_of
from tests.engines.weights.modules import Attention, FusedAttention


def _bound(share: bool = True, o_rows: int = 8, flat: bool = True) -> tuple[Attention, FusedAttention, Binding]:
    ours = Attention()
    if flat:
        flatten_in_place(ordered_parameters(ours))
    with without_storage():
        theirs = FusedAttention(o_rows)
    storage = {name: parameter.data for name, parameter in ours.named_parameters()} if share else {}
    return ours, theirs, bind(theirs, shapes_of(ours), storage, torch.float32, USUAL)


def test_binding_shares_storage_and_allocates_none_before() -> None:
    """What the trainer writes is there at once; without a flat buffer the same parts can only be copied."""
    ours, theirs, binding = _bound()
    assert (len(binding.shared), len(binding.copied)) == (3, 0)
    with torch.no_grad():
        ours.k_proj.weight.fill_(3.0)
    assert torch.equal(theirs.qkv_proj.weight[8:12], torch.full((4, 8), 3.0))
    assert LocalReshard(theirs, binding, ours)() == 0
    with without_storage():
        stub = FusedAttention()
    assert stub.qkv_proj.weight.untyped_storage().nbytes() == 4
    assert nn.Linear(8, 8).weight.untyped_storage().nbytes() == 256  # only within the context
    with without_storage():
        assert nn.Linear(8, 8, dtype=torch.float32).weight.untyped_storage().nbytes() == 4  # as vLLM makes some routers
        assert nn.Embedding(8, 8).weight.untyped_storage().nbytes() == 4
    assert len(nn.Linear(8, 8).weight.unique()) > 1  # drawn again
    *_, apart = _bound(flat=False)
    assert [item.name for item in apart.copied] == ["qkv_proj.weight", "qkv_proj.bias"]


def test_a_parameter_without_a_counterpart_is_refused_on_either_side() -> None:
    """It could be neither written nor compared. Control: the tests above bind all of the same layers."""
    with pytest.raises(UserError, match=r"FusedAttention .* 1 of vLLM's \(o_proj\.weight\), 1 of the model's \(o_proj"):
        _bound(o_rows=9)
    ours, theirs = Attention(), FusedAttention()
    theirs.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"without a known counterpart: 1 of vLLM's \(extra\):"):
        bind(theirs, shapes_of(ours), {}, torch.float32, USUAL)
    shapes = {**shapes_of(ours), "scale": (3,)}
    with pytest.raises(UserError, match=r"without a known counterpart: 1 of the model's \(scale\):"):
        bind(FusedAttention(), shapes, {}, torch.float32, USUAL)
    with pytest.raises(UserError, match="3 of vLLM's"):  # of another dtype: no bits to compare
        bind(FusedAttention().double(), shapes_of(ours), {}, torch.float32, USUAL)


def test_a_reshard_that_leaves_a_slice_out_is_refused() -> None:
    """What was not compared is not verified. Control: the whole list of slices."""
    ours, theirs, binding = _bound(share=False)
    copies = Copies(theirs, binding, shapes_of(ours))
    wholes = {name: parameter.data for name, parameter in ours.named_parameters()}
    copies.check_complete([copies.copy(wholes)])
    wholes.pop("k_proj.weight")
    with pytest.raises(RuntimeError, match="compared 6 of 7 slices"):
        copies.check_complete([copies.copy(wholes)])


def test_tensors_that_are_made_of_parameters_are_seen() -> None:
    """Packed copies, and parameters that were exchanged. Control: nothing changed, and scales of one element."""
    _, theirs, _ = _bound()
    before = held(theirs)
    theirs.qkv_proj.scale = torch.ones(())
    assert held(theirs) == before
    theirs.o_proj.packed = theirs.o_proj.weight.detach().clone()
    theirs.qkv_proj.weight = nn.Parameter(theirs.qkv_proj.weight.detach().clone())
    assert {name for name, place in held(theirs).items() if before.get(name) != place} == {
        "o_proj.packed",
        "qkv_proj.weight",
    }


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
