"""FlexAttention for packed sequences on GPUs: what the other kernels there have no place for.

It is PyTorch's own, compiled for what a model does to its scores: a cap (Gemma 2), sinks (gpt-oss: a learned score of
each head that stands beside those of the keys, and takes a part of the weights to nowhere), values of another size than
the keys (DeepSeek), and float32. Of sinks the kernel knows nothing: it also returns the logarithm l of the sum that
weights are divided by, and with a sink s that sum is exp(l) + exp(s), so the output shrinks by sigmoid(l - s).

Which keys a query sees is a stretch of them, from a first to a last one, and both only grow from query to query. So the
table of blocks that the kernel visits is made of those two numbers, on the device and without waiting for it: once per
micro-batch and window, kept with the layout.

Suffixes: `_N` tokens of a run, `_K` keys, `_S1` sequence bounds, `_Q` and `_B` blocks of queries and of keys.
Left out: when it is taken (attention_kernel.py); FlashAttention 4's own cap, which has no backward pass for sequences
of different lengths.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from penstock.engines.batches.packing import PackedLayout

VARIANTS = 32  # of compiled code, at most: beyond that the compiler gives up, and a training ends
BLOCK = 128  # queries, and keys, of a block; PyTorch's tiles divide it


def packed_flex_attention(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within packed sequences; [N, heads, size of a value], differentiable.

    Args:
        query_N: [N, heads, head size], the last of their sequence's keys; there may be fewer heads of keys.
        value_K: [K, key heads, size of a value].
        sliding_window: a token sees itself and this many less one before it; None: all before it.
        softcap: c, where scores are c tanh(score / c).
        sinks: [heads].
    """
    mask = mask_of(layout, len(query_N), len(key_K), sliding_window)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_N, key_K, value_K))
    options = kernel_options(query_N.dtype, max(query_N.shape[-1], value_K.shape[-1]))
    out: torch.Tensor = _compiled()(query, key, value, mask, scale, softcap, sinks, options)
    return out[0].transpose(0, 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    options: Any,
) -> torch.Tensor:
    """Attention of [1, heads, tokens, size] with what a model does to its scores: this is what is compiled."""

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else capped
    grouped = query.shape[1] != key.shape[1]
    out, aux = flex_attention(
        query, key, value, score_mod, mask, scale, grouped, kernel_options=options, return_aux=AuxRequest(lse=True)
    )
    if sinks is None:
        return out
    assert aux.lse is not None
    kept = torch.sigmoid(aux.lse - sinks.float().unsqueeze(-1))
    return (out * kept.unsqueeze(-1)).to(out.dtype)


@functools.cache
def _compiled() -> Any:
    """Return `attend`, compiled for any number of tokens.

    In one graph or not at all: uncompiled it would write out the scores of all queries and keys. The compiler takes
    sizes that are equal by chance for the same one, so what it compiles first may be compiled once more.
    """
    torch._dynamo.config.specialize_float = True  # scales and caps are constants of a model
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(attend, dynamic=True, fullgraph=True)


def kernel_options(dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Return tiles that a Hopper GPU's shared memory holds, where PyTorch's own choice may be larger."""
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}  # short runs, too: its other kernel is for decoding
    if size <= 128:
        return options
    if dtype == torch.float32:
        return options | {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
    return options | {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 3}


def mask_of(layout: PackedLayout, tokens: int, keys: int, sliding_window: int | None) -> BlockMask:
    """Return which keys each of a run's tokens sees, made when it is first asked for."""
    window = None if sliding_window is None or sliding_window >= layout.max_keys else sliding_window
    if window not in layout.masks:
        layout.masks[window] = block_mask(layout, tokens, keys, window)
    mask: BlockMask = layout.masks[window]
    return mask


@torch.no_grad()
def block_mask(layout: PackedLayout, tokens: int, keys: int, window: int | None) -> BlockMask:
    """Return which blocks of keys each block of queries looks at, and which it looks at whole."""
    first_N, last_N = keys_seen(layout, tokens, window)

    def seen(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first_N[query] <= key) & (key <= last_N[query])

    begin_Q, begin_B = (_begins(count, first_N.device) for count in (tokens, keys))
    end_Q, end_B = (begin_Q + BLOCK - 1).clamp(max=tokens - 1), begin_B + BLOCK - 1
    reaches_B = torch.searchsorted(last_N, begin_B)  # the first query that sees, or looks past, the block's first key
    reaches_QB = torch.maximum(begin_Q.unsqueeze(1), reaches_B)
    some_QB = (reaches_QB <= end_Q.unsqueeze(1)) & (first_N[reaches_QB.clamp(max=tokens - 1)] <= end_B)
    whole_Q = begin_Q + BLOCK <= tokens
    all_Q = last_N[begin_Q.clamp(max=tokens - 1)].unsqueeze(1) >= end_B
    whole_QB = whole_Q.unsqueeze(1) & all_Q & (first_N[end_Q].unsqueeze(1) <= begin_B)
    return BlockMask.from_kv_blocks(
        *_listed(some_QB & ~whole_QB),
        *_listed(whole_QB),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(tokens, keys),
    )


def keys_seen(layout: PackedLayout, tokens: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last key that each of a run's tokens sees, [N] each."""
    queries_S1, keys_S1 = layout.cu_queries_S1, layout.cu_keys_S1
    query_N = torch.arange(tokens, dtype=torch.int32, device=queries_S1.device)
    sequence_N = torch.searchsorted(queries_S1[1:], query_N, right=True)
    last_N = query_N + (keys_S1 - queries_S1)[1:][sequence_N]  # queries are the last of their sequence's keys
    first_N = keys_S1[:-1][sequence_N]
    if window is not None:
        first_N = torch.maximum(first_N, last_N - (window - 1))
    return first_N, last_N


def _begins(count: int, device: torch.device) -> torch.Tensor:
    """Return where blocks of so many tokens begin: at least two, since what has a size of 1 is compiled for itself."""
    return torch.arange(0, max(count, BLOCK + 1), BLOCK, dtype=torch.int32, device=device)


def _listed(chosen_QB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks each row has, and which, those first: [1, 1, ...], as a `BlockMask` wants it."""
    order_QB = chosen_QB.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_QB.sum(-1, dtype=torch.int32)[None, None], order_QB.int()[None, None]
