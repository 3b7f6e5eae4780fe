"""PyTorch's attention over rows of different lengths, whatever its release calls it, and what kernels a rank has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import varlen

from penstock.base.errors import UserError
from penstock.configs.sections.model import AttentionKernel
from penstock.engines.commands.build import Kernels
from penstock.engines.families.attention import (
    FLOAT32,
    INSTEAD_OF_4,
    no_flash_kernel,
    of_other_device,
)
from penstock.engines.families.table import CAPS, SINKS
from penstock.engines.kernels import flash_attention, gated_mlp
from penstock.engines.kernels.flex_attention import packed_flex_attention

if TYPE_CHECKING:
    from penstock.engines.batches.packing import PackedLayout


_chosen: list[AttentionKernel] = ["auto"]  # of this process: all models of a rank are on one device
VARLEN_PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters)  # they grew from version to version


def choose_attention(kernel: AttentionKernel, device_type: str) -> None:
    """Let all models of this process have a kernel.

    Raises:
        UserError: it is not one for this rank's device, or cannot be imported.
    """
    if kernel != "auto" and (kernel == "sdpa") != (device_type == "cpu"):
        raise UserError(*of_other_device(kernel, gpu=device_type == "cuda"))
    if kernel == "flash_attention_4" and not flash_attention.usable():
        why = flash_attention.obstacle() if flash_attention.on_hopper() else "this rank's GPU is no Hopper GPU"
        raise UserError(f"model.attention={kernel}: {why}", INSTEAD_OF_4)
    _chosen[:] = [kernel]


# A constant for the compiler, as `flash_attention.usable`: it is chosen before a block is compiled.
@torch.compiler.assume_constant_result
def takes_flash_attention_4() -> bool:
    """Whether attention on this process's GPU is FlashAttention 4."""
    return _chosen[0] != "flash_attention_2" and flash_attention.usable()


def causal_varlen_attention(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within packed sequences; [N, heads, size of a value]. GPU only.

    Queries are the last of their sequence's keys. There may be fewer heads of keys than of queries.

    Raises:
        UserError: the model has a sliding window, and this PyTorch's kernel has none; or it needs FlexAttention, and
            another kernel was chosen.
    """
    why = _flex_alone(query_N, value_K, softcap, sinks)
    if why or chosen() == "flex":
        return _by_flex(why, query_N, key_K, value_K, layout, scale, sliding_window, softcap, sinks)
    if takes_flash_attention_4():
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


@torch.compiler.assume_constant_result
def chosen() -> AttentionKernel:
    """Return the kernel that was chosen."""
    return _chosen[0]


def _flex_alone(query_N: torch.Tensor, value_K: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None) -> str:
    """Return what a model does that FlexAttention alone computes; empty: nothing."""
    if softcap is not None:
        return CAPS
    if sinks is not None:
        return SINKS
    if value_K.shape[-1] != query_N.shape[-1]:
        return "has values of another size than its keys"
    return FLOAT32 if query_N.is_cuda and query_N.dtype == torch.float32 else ""


# The compiler leaves it as it is: what it calls is compiled by itself, once for all layers.
@torch.compiler.disable
def _by_flex(why: str, *arguments: Any) -> torch.Tensor:
    if why and chosen().startswith("flash"):
        raise UserError(*no_flash_kernel(chosen(), why))
    return packed_flex_attention(*arguments)


def kernels_on(device_type: str, flex: bool = False) -> Kernels:
    """Return which kernel attention takes, and what keeps this GPU from faster kernels that there are for it.

    Args:
        flex: the model needs FlexAttention there.
    """
    if device_type != "cuda":
        return Kernels("PyTorch's, of rows side by side", slower=[])
    faster = {"FlashAttention 4": flash_attention, "gated MLP": gated_mlp}
    wanting = faster if flash_attention.on_hopper() else {}
    flex = flex or _chosen[0] == "flex"
    if flex or _chosen[0] == "flash_attention_2":
        wanting.pop("FlashAttention 4", None)  # nobody misses what was not wanted
    slower = [f"no {name}: {why}" for name, module in wanting.items() if (why := module.obstacle())]
    if flex:
        return Kernels("FlexAttention", slower)
    return Kernels("FlashAttention 4" if takes_flash_attention_4() else "FlashAttention 2", slower)
