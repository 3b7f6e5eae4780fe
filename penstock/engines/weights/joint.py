"""The process group between the trainer's first rank and the ranks of a rollout group on other devices.

Both groups have a torch.distributed world of their own, so this one is a backend built by hand over a store: the
trainer opens the store (penstock/engines/groups/interface.py) and says where it is, the flow tells the rollout group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from penstock.engines.groups import interface
from penstock.engines.weights.slices import shapes_of


@dataclass(frozen=True)
class Joint:
    """Collectives between the sender of weights, its rank 0, and their receivers."""

    backend: Any
    size: int

    def broadcast(self, values: torch.Tensor) -> Any:
        """Begin to send a contiguous tensor from rank 0 to all others; `wait()` on the result orders later work."""
        return self.backend.broadcast(values, 0)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        self.backend.allreduce([values]).wait()
        return values


def join(store: Any, rank: int, size: int, device: torch.device, lm: nn.Module, timeout_s: float) -> Joint:
    """Join the group; returns when all ranks have.

    Args:
        lm: the trained model, or its shapes alone.
        timeout_s: deadline of each later collective.

    Raises:
        RuntimeError: sender and receivers hold different models; collectives of other sizes would hang.
    """
    layout = layout_digest(shapes_of(lm), next(lm.parameters()).dtype)
    store.set(f"layout/{rank}", layout)
    if any(store.get(f"layout/{other}").decode() != layout for other in range(size)):
        raise RuntimeError("actor and rollout group hold models of different parameters, shapes or dtypes")
    backend = process_group(device, store, rank, size, timedelta(seconds=timeout_s))
    joint = Joint(backend, size)
    joint.total(torch.zeros(1, device=device)).cpu()  # NCCL connects with the first collective: not in a reshard
    return joint


def layout_digest(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> str:
    """Return a digest of names, shapes, order and dtype."""
    described = json.dumps([[name, list(shape)] for name, shape in shapes.items()] + [str(dtype)])
    return hashlib.sha256(described.encode()).hexdigest()


def process_group(device: torch.device, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend for collectives among processes that share a store and no torch.distributed world."""
    if device.type == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(hostname=interface.own_address())]
    return gloo(store, rank, size, options)
