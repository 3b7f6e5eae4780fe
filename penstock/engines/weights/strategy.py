"""The parts of a reshard strategy on one rank, by its name, on which penstock/engines/groups/placement.py decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.engines.weights.experts import cut_of
from penstock.engines.weights.gather import GatherReshard
from penstock.engines.weights.layout import flat_storage
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.local import LocalReshard
from penstock.engines.weights.lora import resting_parameters
from penstock.engines.weights.slices import shapes_of

Transfer = Callable[[], int]  # brings weights, proves it, returns the bytes moved on this rank


def shared_storage(
    strategy: str, lm: nn.Module, tensor_parallel: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face parameters that vLLM's may be views of; none where a rank holds none whole.

    Weights with an adapter are not among them: vLLM needs them merged, and the base must stay as it is. Nor are experts
    that lie on several ranks.
    """
    if strategy in ("shared", "local"):
        resting = resting_parameters(lm)
        return {name: parameter.data for name, parameter in resting.items() if cut_of(parameter) is None}
    if strategy in ("broadcast", "folder") and tensor_parallel == 1:
        return flat_storage(shapes_of(lm), dtype, device)
    return {}


def transfer_within_group(strategy: str, model: Any, binding: Binding, lm: nn.Module) -> Transfer:
    """Return the reshard of a rank that both trains and generates."""
    return GatherReshard(model, binding, lm) if strategy == "gather" else LocalReshard(model, binding, lm)
