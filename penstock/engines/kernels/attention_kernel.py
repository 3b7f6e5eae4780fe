"""PyTorch's attention over rows of different lengths, whatever its release calls it, and what kernels a rank has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import varlen

from penstock.base.errors import UserError
from penstock.engines.commands.build import Kernels
from penstock.engines.kernels import flash_attention, gated_mlp

if TYPE_CHECKING:
    from penstock.engines.batches.packing import PackedLayout


VARLEN_PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters)  # they grew from version to version


def causal_varlen_attention(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal flash attention within packed sequences; [N, heads, head size]. GPU only.

    Queries are the last of their sequence's keys. There may be fewer heads of keys than of queries.

    Raises:
        UserError: the model has a sliding window, and this PyTorch's kernel has none.
    """
    if flash_attention.usable():
        bounds = (layout.cu_queries_S1, layout.cu_keys_S1, layout.max_queries, layout.max_keys)
        before = None if sliding_window is None else sliding_window - 1
        return flash_attention.flash_attention(
            query_N, key_K, value_K, bounds, query_N.shape[-1] ** -0.5 if scale is None else scale, before
        )
    if "window_size" in VARLEN_PARAMETERS:
        options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    elif sliding_window is None or sliding_window >= layout.max_keys:
        options = {"is_causal": True}
    else:
        raise UserError(
            "the model's sliding window is shorter than its sequences, and this PyTorch's kernel has no window",
            "use a newer PyTorch, or shorter prompts and responses",
        )
    if "enable_gqa" in VARLEN_PARAMETERS:  # where it is missing the kernel takes fewer key heads as they are
        options["enable_gqa"] = True
    out_N: Any = varlen.varlen_attn(
        query_N,
        key_K,
        value_K,
        layout.cu_queries_S1,
        layout.cu_keys_S1,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        **options,
    )
    return out_N


def kernels_on(device_type: str) -> Kernels:
    """Return which kernel attention takes, and what keeps this GPU from faster kernels that there are for it."""
    if device_type != "cuda":
        return Kernels("PyTorch's, of rows side by side", slower=[])
    faster = {"FlashAttention 4": flash_attention, "gated MLP": gated_mlp}
    wanting = faster if flash_attention.on_hopper() else {}
    slower = [f"no {name}: {why}" for name, module in wanting.items() if (why := module.obstacle())]
    return Kernels("FlashAttention 4" if flash_attention.usable() else "FlashAttention 2", slower)
