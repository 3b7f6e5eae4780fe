"""The flat buffer holds every parameter once, and those that vLLM fuses side by side."""

from __future__ import annotations

import torch

from penstock.engines.families.table import USUAL
from penstock.engines.weights.layout import (
    FusedParameter,
    flat_storage,
    flatten_in_place,
    fused_view,
    ordered_parameters,
    plan,
)
from penstock.engines.weights.slices import shapes_of
from tests.engines.weights.modules import Attention


def test_the_plan_puts_fused_parts_together_and_drops_none() -> None:
    """Weights and biases fuse separately, in vLLM's row order; whatever is not fused keeps its place."""
    assert plan((name for name, _ in Attention().named_parameters()), USUAL) == [
        FusedParameter("qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        FusedParameter("qkv_proj.bias", ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        FusedParameter("o_proj.weight", ("o_proj.weight",)),
    ]
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert [fused.name for fused in plan(names, USUAL)] == ["model.layers.0.mlp.gate_up_proj.weight", "lm_head.weight"]
    assert plan(["q_proj.weight"], USUAL) == [FusedParameter("q_proj.weight", ("q_proj.weight",))]


def test_a_fused_view_exists_only_over_neighbours_in_order() -> None:
    """A view over anything else would be a matrix of the wrong rows."""
    flat = torch.arange(48.0)
    a, b, c = (flat[start : start + 16].view(2, 8) for start in (0, 16, 32))
    view = fused_view([a, b])
    assert view is not None
    assert torch.equal(view, torch.cat([a, b]))
    assert view.data_ptr() == a.data_ptr()
    assert fused_view([b, a]) is None
    assert fused_view([a, c]) is None
    assert fused_view([a, b.clone()]) is None
    assert fused_view([a, flat[16:32].view(4, 4)]) is None
    assert fused_view([a, b.t()]) is None


def test_flattening_moves_parameters_and_keeps_their_values() -> None:
    """One buffer in the order given; writing through it reaches the module."""
    module = Attention()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = flatten_in_place(ordered_parameters(module))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert flat.numel() == sum(parameter.numel() for parameter in module.parameters())
    flat.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_flat_storage_elsewhere_has_the_trainers_layout() -> None:
    """What is sent as one piece of the trainer's buffer lands in the right parameters."""
    module = Attention()
    flat = flatten_in_place(ordered_parameters(module))
    storage = flat_storage(shapes_of(module), torch.float32, torch.device("cpu"))
    whole = fused_view([part.view(-1) for part in storage.values()])
    assert whole is not None
    whole.copy_(flat)
    assert all(torch.equal(storage[name], parameter) for name, parameter in module.named_parameters())
