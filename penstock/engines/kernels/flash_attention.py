"""FlashAttention 4 for packed sequences on Hopper GPUs: two PyTorch operators, so that torch.compile keeps them whole.

What autograd does with them is a function of autograd and no property of the operators: the compiler's cache knows the
code of the one, not of the other.

The kernels are those of flash-attention's CuTe package, which vLLM brings along and its rollout engine may use itself.
They are compiled when first called, in about five seconds each, and kept on disk for other processes. Forward and
backward take 58 % of the time of PyTorch's own FlashAttention 2 (benchmarks/LOG.md).

Suffixes: `_N` tokens of a run, `_K` keys, `_S1` sequence bounds, `_HN` heads times tokens.
Left out: other GPUs, which have PyTorch's kernel (penstock/engines/rollout/vllm.py); deterministic gradients.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from penstock.engines.groups.machine import HOPPER


# The compiler takes the answer as a constant, and must find a plain function to do so: behind a cache it would trace
# the import below, and cut every block in two.
@torch.compiler.assume_constant_result
def usable() -> bool:
    """Whether this process's GPU is one for these kernels, and the installed vLLM has them."""
    return on_hopper() and obstacle() is None


def on_hopper() -> bool:
    """Whether this process's GPU is one for these kernels."""
    return torch.cuda.get_device_capability() == HOPPER


@functools.cache
def obstacle() -> str | None:
    """Why the kernels cannot be imported here: a vLLM without them, or without what compiles them. None if they can."""
    try:
        _kernels()
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _kernels() -> Any:
    """vLLM's module of the kernels.

    Raises:
        ImportError: the installed vLLM has none.
    """
    from vllm import envs

    # Beside vLLM's own compiled code. The package's default is a folder in /tmp that anyone could have made first.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(envs.VLLM_CACHE_ROOT, "flash_attention")))
    from vllm.vllm_flash_attn.cute import interface

    return interface


def flash_attention(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within packed sequences; [N, heads, head size], differentiable.

    Args:
        query_N: [N, heads, head size], the last of their sequence's keys; there may be fewer heads of keys.
        bounds: cu_queries_S1 and cu_keys_S1 (int32), the most queries and the most keys of a sequence.
        window: a token sees itself and this many before it; None: all before it.
    """
    out_N: torch.Tensor = _FlashAttention.apply(query_N, key_K, value_K, *bounds, scale, window)
    return out_N


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_N: torch.Tensor,
        key_K: torch.Tensor,
        value_K: torch.Tensor,
        cu_queries_S1: torch.Tensor,
        cu_keys_S1: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        out_N, logsumexp_HN = _forward(query_N, key_K, value_K, cu_queries_S1, cu_keys_S1, *rest)
        ctx.save_for_backward(query_N, key_K, value_K, out_N, logsumexp_HN, cu_queries_S1, cu_keys_S1)
        ctx.rest = rest
        return out_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> Any:
        return *_backward(grad_N, *ctx.saved_tensors, *ctx.rest), *[None] * 6


def _options(
    cu_queries_S1: torch.Tensor,
    cu_keys_S1: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None,
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_queries_S1,
        "cu_seqlens_k": cu_keys_S1,
        "max_seqlen_q": most_queries,
        "max_seqlen_k": most_keys,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": window,
    }


# Each value is a parameter here and below: an operator of PyTorch takes tensors and numbers, no object of ours.
@torch.library.custom_op("penstock::flash_attention", mutates_args=(), device_types="cuda")
def _forward(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    cu_queries_S1: torch.Tensor,
    cu_keys_S1: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's output and the logsumexp_HN that its backward pass needs."""
    options = _options(cu_queries_S1, cu_keys_S1, most_queries, most_keys, scale, window)
    out_N, logsumexp_HN, *_ = _kernels()._flash_attn_fwd(query_N, key_K, value_K, return_lse=True, **options)
    return out_N, logsumexp_HN


@_forward.register_fake
def _(query_N: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = query_N.shape[:2]
    return query_N.new_empty(query_N.shape), query_N.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("penstock::flash_attention_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad_N: torch.Tensor,
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    out_N: torch.Tensor,
    logsumexp_HN: torch.Tensor,
    cu_queries_S1: torch.Tensor,
    cu_keys_S1: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    options = _options(cu_queries_S1, cu_keys_S1, most_queries, most_keys, scale, window)
    # Contiguous as the compiler is told below; by itself the kernel would take over the inputs' order in memory.
    grads = query_N.new_empty(query_N.shape), key_K.new_empty(key_K.shape), value_K.new_empty(value_K.shape)
    options |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    _kernels()._flash_attn_bwd(query_N, key_K, value_K, out_N, grad_N, logsumexp_HN, **options)
    return grads


@_backward.register_fake
def _(grad_N: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])
