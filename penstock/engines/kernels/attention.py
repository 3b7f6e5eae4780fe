"""Attention over packed sequences, registered with transformers under the name `packed`.

On a GPU it is variable-length flash attention (penstock/engines/rollout/vllm.py knows whose): no mask, no padding. The
CPU has no such kernel, so there queries, keys and values are spread to rows for the attention alone, and gathered back:
every other layer still sees only real tokens. Spreading needs no mask either: it pads on the right, and a causal token
never looks right.

Where rows share what they begin with (penstock/engines/batches/packing.py), its keys and values are repeated for each
of them; a row's own queries are the last of their sequence, which is how the causal kernel aligns fewer queries than
keys.

Of a run that several ranks compute together each has all tokens here, and its part of the heads
(penstock/engines/kernels/sequence_parallel.py).

Capped scores (Gemma 2), sinks (gpt-oss: a learned score of each head that stands beside those of the keys, and takes a
part of the weights to nowhere) and values of a size of their own (DeepSeek) are written out on a CPU; on a GPU they are
FlexAttention's (penstock/engines/kernels/flex_attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.engines.batches.packing import PackedLayout, SharedPrefixes
from penstock.engines.families.architecture import unpackable
from penstock.engines.kernels.attention_kernel import causal_varlen_attention
from penstock.engines.kernels.sequence_parallel import own_tokens_of_heads, tokens_of_own_heads

NAME = "packed"


# The parameters are those by which transformers calls an attention.
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query: [1, heads, N, head size]; key and value: [1, kv heads, N, head size], values of a size of their own.
        packing: where the sequences lie; None from a model that does not hand it on.
        sliding_window: a token sees itself and this many less one before it; None: all before it.
        s_aux, softcap: what transformers calls attention sinks, [heads], and the cap of the scores.

    Returns:
        [1, N, heads, size of a value], and no attention weights.

    Raises:
        UserError: with several ranks the model has sinks; it hands no `packing` on; or see `causal_varlen_attention`.
    """
    if packing is None:
        raise unpackable("the model", "does not tell its attention where sequences lie")
    if packing.share is not None and s_aux is not None:
        raise unpackable("the model", "has attention sinks, whose heads are not shared out to ranks")
    query_N, key_N, value_N = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if packing.share is not None:
        query_N, key_N, value_N = tokens_of_own_heads(packing.share, query_N, key_N, value_N)
    key_K, value_K = (repeat_prefixes(tensor_N, packing.shared) for tensor_N in (key_N, value_N))
    if packing.slots_K is None:
        out_N = causal_varlen_attention(query_N, key_K, value_K, packing, scaling, sliding_window, softcap, s_aux)
    else:
        out_N = attention_by_rows(query_N, key_K, value_K, packing, scaling, sliding_window, softcap, s_aux)
    if packing.share is not None:
        out_N = own_tokens_of_heads(packing.share, out_N)
    return out_N.unsqueeze(0), None


def attention_by_rows(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    packing: PackedLayout,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Spread packed sequences to rows, compute their attention, and gather it again; [N, heads, size of a value]."""
    slots_K, shared = packing.slots_K, packing.shared
    assert slots_K is not None
    query_K = query_N if shared is None else query_N.index_select(0, shared.source_K)
    query, key, value = (side_by_side(tensor, packing, slots_K).transpose(1, 2) for tensor in (query_K, key_K, value_K))
    window = _window(packing.max_keys, sliding_window)
    if softcap is not None or sinks is not None:
        out = _written_out(query, key, value, window, scale, softcap, sinks)
    else:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=window,
            is_causal=window is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return in_one_run(out.transpose(1, 2), packing, slots_K)


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: torch.Tensor | None,
    scale: float | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with the scores c tanh(score / c), or with sinks: PyTorch's kernel has neither."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if window is None else window
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value


def repeat_prefixes(tensor_N: torch.Tensor, shared: SharedPrefixes | None) -> torch.Tensor:
    """Return keys or values of all sequences, [K, heads, head size]: shared ones once for each row.

    They are contiguous: as columns of a joint product they would keep all of it for the backward pass.
    """
    if shared is None:
        return tensor_N.contiguous()
    return _Repeat.apply(tensor_N, shared.source_K, shared.own_N, shared.copies_C, shared.copied_C)


class _Repeat(torch.autograd.Function):
    """A gather whose backward pass adds up only what was repeated, in float32: the rest has one gradient each."""

    @staticmethod
    def forward(ctx: Any, tensor_N: torch.Tensor, source_K: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*rest)
        return tensor_N.index_select(0, source_K)

    @staticmethod
    def backward(ctx: Any, grad_K: torch.Tensor) -> Any:
        own_N, copies_C, copied_C = ctx.saved_tensors
        grad_N = grad_K.index_select(0, own_N).float()
        grad_N.index_add_(0, copied_C, grad_K.index_select(0, copies_C).float())
        return grad_N.to(grad_K.dtype), None, None, None, None


def _window(length: int, sliding_window: int | None) -> torch.Tensor | None:
    """Return which keys a query sees, [length, length], or None if that is all before it."""
    if sliding_window is None or sliding_window >= length:
        return None
    position = torch.arange(length)
    distance = position.unsqueeze(1) - position
    return (distance >= 0) & (distance < sliding_window)


def side_by_side(tensor_K: torch.Tensor, packing: PackedLayout, slots_K: torch.Tensor) -> torch.Tensor:
    """Return [K, ...] as rows, [sequences, longest, ...], with zeros behind each."""
    slots = tensor_K.new_zeros(packing.sequences * packing.max_keys, *tensor_K.shape[1:])
    return slots.index_copy(0, slots_K, tensor_K).view(packing.sequences, packing.max_keys, *tensor_K.shape[1:])


def in_one_run(rows: torch.Tensor, packing: PackedLayout, slots_K: torch.Tensor) -> torch.Tensor:
    """Return of rows [sequences, longest, ...] the tokens of the run [N, ...], what rows share once."""
    wanted_N = slots_K if packing.shared is None else slots_K[packing.shared.own_N]
    return rows.flatten(0, 1).index_select(0, wanted_N)


AttentionInterface.register(NAME, packed_attention)
