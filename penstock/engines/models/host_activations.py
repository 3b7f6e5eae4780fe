"""What recomputed blocks begin with, kept in host memory between forward and backward pass (`offload_activations`).

With gradient checkpointing a block keeps its input alone. On a GPU that is copied to page-locked memory while the block
computes, and comes back while the block behind it is computed again; streams of their own copy, events order them, and
the host waits for nothing. At most three inputs are on the GPU at a time (one used, one coming, one going) instead of
one for each block.

Left out: what a block itself keeps while it is computed again, and all outside of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class KeptInput:
    """An input in host memory, and on the device again once it was fetched."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: KeptInput | None) -> None:
        self.host, self.device = host, device
        self.before = None if before is None else ref(before)  # of the block before; autograd owns both
        self.fetched: torch.Tensor | None = None
        self.there: Any = None  # events of a GPU: the copy to the host is whole, and the one back
        self.back: Any = None


class HostActivations:
    """Copies the inputs of blocks to the host and back; `kept` counts them."""

    def __init__(self) -> None:
        self.kept = 0
        self._newest: ref[KeptInput] | None = None
        self._streams: tuple[Any, Any] | None = None  # to the host, and back

    def checkpointing(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function whose blocks keep their inputs here."""

        def to_host(*arguments: Any, **settings: Any) -> Any:
            with saved_tensors_hooks(self._keep, self._fetch):
                return checkpoint(*arguments, **settings)

        return to_host

    @torch.no_grad()
    def _keep(self, tensor: torch.Tensor) -> KeptInput | torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor  # checkpointing's own marker
        gpu = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=gpu)
        kept = KeptInput(host, tensor.device, None if self._newest is None else self._newest())
        with self._stream(tensor.device, 0):
            host.copy_(tensor, non_blocking=True)
            if gpu:
                tensor.record_stream(torch.cuda.current_stream())
                kept.there = torch.cuda.current_stream().record_event()
        self._newest, self.kept = ref(kept), self.kept + 1
        return kept

    @torch.no_grad()
    def _fetch(self, kept: KeptInput | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._begin(kept)
        before = None if kept.before is None else kept.before()
        if before is not None:  # comes while this block is computed again
            self._begin(before)
        tensor, kept.fetched = kept.fetched, None
        assert tensor is not None
        if kept.back is not None:
            torch.cuda.current_stream().wait_event(kept.back)
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _begin(self, kept: KeptInput) -> None:
        if kept.fetched is not None:
            return
        if kept.there is None:
            kept.fetched = kept.host
            return
        with self._stream(kept.device, 1):
            torch.cuda.current_stream().wait_event(kept.there)
            kept.fetched = kept.host.to(kept.device, non_blocking=True)
            kept.back = torch.cuda.current_stream().record_event()

    def _stream(self, device: torch.device, which: int) -> Any:
        """Return a context in which a stream of our own copies; to the host behind what is computed so far."""
        if device.type != "cuda":
            return nullcontext()
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        if which == 0:
            self._streams[0].wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._streams[which])


def keep_on_host(lm: nn.Module) -> HostActivations:
    """Let the blocks of a model with gradient checkpointing keep their inputs in host memory.

    Raises:
        RuntimeError: none of its modules is checkpointed.
    """
    store = HostActivations()
    wrapped = 0
    for module in lm.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            checkpoint: Any = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = store.checkpointing(checkpoint)  # type: ignore[assignment]
            wrapped += 1
    if not wrapped:
        raise RuntimeError("no block of the model is recomputed in the backward pass")
    return store
