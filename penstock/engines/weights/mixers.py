"""Lets vLLM's layers of Mamba 2, and gated delta nets, compute with what is trained, where they would keep another.

When vLLM reads a folder it makes A = -exp(A_log) of a weight and keeps the result alone, and looks at the convolution's
weight through a second tensor. Here both are made of the weights whenever they are asked for: so `A_log` is a parameter
on both sides, a reshard compares it like all others, and the weights may lie where the trainer has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compute_from_weights(vllm_model: nn.Module, dtype: torch.dtype) -> None:
    """Give such layers in vLLM's model, just initialised, an `A_log` of this dtype; Mamba 2 has it in place of `A`."""
    from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    nets: list[Any] = [module for module in vllm_model.modules() if isinstance(module, GatedDeltaNetAttention)]
    for net in nets:  # it is float32 there, and the trainer's own is of the weights' dtype
        net.A_log = nn.Parameter(torch.empty(net.A_log.shape, dtype=dtype, device=net.A_log.device))
    for mixer in [module for module in vllm_model.modules() if isinstance(module, MambaMixer2)]:
        shape, device = mixer.A.shape, mixer.A.device
        del mixer.A, mixer.conv_weights
        mixer.A_log = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        mixer.__class__ = _made_of_weights(type(mixer))


def _made_of_weights(kind: Any) -> Any:
    made = {"A": property(_decay), "conv_weights": property(_taps)}
    return type(kind.__name__, (kind,), made)


def _decay(mixer: Any) -> torch.Tensor:
    decay: torch.Tensor = -torch.exp(mixer.A_log.float())
    return decay


def _taps(mixer: Any) -> torch.Tensor:
    weight: torch.Tensor = mixer.conv1d.weight
    return weight.view(weight.size(0), weight.size(2))
