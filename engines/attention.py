"""Attention over packed sequences, registered with transformers under the name `packed`.

On a GPU it is PyTorch's own variable-length flash attention: no mask, no padding. PyTorch has no such kernel for the
CPU, so there queries, keys and values are spread to rows for the attention alone, and gathered back: every other layer
still sees only real tokens. Spreading needs no mask either: it pads on the right, and a causal token never looks right.

Left out: attention sinks and capped scores (refused when a model is loaded, engines/models.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engines.packing import PackedLayout
from engines.versions import causal_varlen_attention

NAME = "packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query: [1, heads, N, head size]; key and value: [1, kv heads, N, head size].
        packing: where the sequences lie.
        sliding_window: a token sees itself and this many less one before it; None: all before it.

    Returns:
        [1, N, heads, head size], and no attention weights.
    """
    query_N, key_N, value_N = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.device.type == "cuda":
        out_N = causal_varlen_attention(
            query_N, key_N, value_N, packing.cu_seqlens_B1, packing.max_length, scaling, sliding_window
        )
        return out_N.unsqueeze(0), None
    assert packing.slots_N is not None
    spread_query, spread_key, spread_value = (
        _spread(tensor, packing, packing.slots_N) for tensor in (query_N, key_N, value_N)
    )
    grouped = query.shape[1] != key.shape[1]
    window = _window(packing.max_length, sliding_window)
    out = scaled_dot_product_attention(
        spread_query,
        spread_key,
        spread_value,
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=grouped,
    )
    out_N = out.transpose(1, 2).reshape(-1, *query_N.shape[1:]).index_select(0, packing.slots_N)
    return out_N.unsqueeze(0), None


def _window(length: int, sliding_window: int | None) -> torch.Tensor | None:
    """Return which keys a query sees, [length, length], or None if that is all before it."""
    if sliding_window is None or sliding_window >= length:
        return None
    position = torch.arange(length)
    distance = position.unsqueeze(1) - position
    return (distance >= 0) & (distance < sliding_window)


def _spread(tensor_N: torch.Tensor, packing: PackedLayout, slots_N: torch.Tensor) -> torch.Tensor:
    """[N, heads, size] -> [rows, heads, longest, size]."""
    slots = tensor_N.new_zeros(packing.rows * packing.max_length, *tensor_N.shape[1:])
    slots = slots.index_copy(0, slots_N, tensor_N)
    return slots.view(packing.rows, packing.max_length, *tensor_N.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
