"""Records which experts of a mixture each token takes in vLLM, so that training can replay them.

They are kept as keys and values are: by the slot of the KV cache that a token has. So tokens that a prompt shares with
another one, and that are found in the prefix cache instead of computed, bring the experts of the pass that computed
them, and it does not matter in which pieces a prompt is computed. vLLM's own (`enable_return_routed_experts`) is a part
of its first model runner for GPUs, brings the experts of every step to the host, and asks a scheduler that sequences
coast past (penstock/engines/rollout/scheduler.py).

On a GPU they lie on the device, and the kernels that put them there are part of vLLM's CUDA graphs: these repeat
kernels and no Python, so what is to be recorded is settled between the KV cache and the graphs. What a graph's batch is
filled up with has no slot. A step brings nothing to the host; a sequence that has ended is copied while others go on.

Suffixes: `_T` tokens of one sequence, `_S` slots of the KV cache, `_N` tokens of a step, `_NK` times experts of each,
`_SLK` slots times layers with experts times experts of each, `_TLK` likewise of tokens.
Left out: the replay (penstock/engines/models/replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.base.errors import UserError
from penstock.engines.batches.packing import to_device
from penstock.engines.rollout import vllm as versions


def put_by_slot(routes_SLK: torch.Tensor, layer: int, slot_N: torch.Tensor, experts_NK: torch.Tensor) -> None:
    """Put the experts of a layer that the tokens of a step take where their slots are; -1 is none, and the last row.

    Kernels alone, at the addresses of `routes_SLK` and `slot_N`, so that a CUDA graph can repeat it.
    """
    routes_SLK[slot_N, layer] = experts_NK.to(routes_SLK.dtype)


class RouteCapture:
    """The experts of all tokens that a vLLM engine keeps keys of, and those of sequences that have ended.

    `listen` comes while the engine starts, `follow` once it has.

    Args:
        experts: of a layer.
    """

    def __init__(self, experts: int) -> None:
        self.unknown = np.iinfo(np.uint8).max if experts <= np.iinfo(np.uint8).max else np.iinfo(np.uint16).max
        # PyTorch puts nothing into uint16: the same bytes are int16 here.
        self._dtype = torch.uint8 if self.unknown == np.iinfo(np.uint8).max else torch.int16
        self._nothing = int(torch.tensor(-1).to(self._dtype))  # `unknown`, in this dtype
        self._routes_SLK = torch.zeros((0, 0, 0), dtype=self._dtype)
        self._ended: dict[str, np.ndarray] = {}
        self._arriving: list[np.ndarray] = []

    def listen(self, model: nn.Module, slots: int) -> None:
        """Record what the routers of vLLM's model choose from now on.

        Args:
            slots: of its KV cache.

        Raises:
            RuntimeError: this version of vLLM does not let its routers be heard.
        """
        routers = versions.routers(model)
        # One slot more: the last one is where vLLM puts what is no token, slot -1.
        shape = (slots + 1, len(routers), routers[0].top_k)
        device = next(model.parameters()).device
        self._routes_SLK = torch.full(shape, self._nothing, dtype=self._dtype, device=device)
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._hear, layer))

    def follow(self, llm: Any) -> None:
        """Keep what a sequence took when it ends.

        Args:
            llm: the in-process vLLM engine, which is idle.

        Raises:
            UserError: its model has other attention than over all keys.
        """
        slots = versions.kv_slots(llm)
        if slots is None:
            raise UserError(
                "actor.routing=replay needs attention over all keys, and some layers of this model have windows",
                "remove it",
            )
        if slots != len(self._routes_SLK) - 1:
            raise RuntimeError(
                f"vLLM's KV cache has {slots} slots, and experts of {len(self._routes_SLK) - 1} are kept"
            )
        versions.before_blocks_are_freed(llm, self._keep)

    def take(self, name: str) -> np.ndarray:
        """Return the experts_TLK of an ended sequence, once; of its last token, which was never computed: unknown.

        On a GPU they are on their way: `finish_copies` comes before they are looked at.
        """
        routes_TLK = self._ended.pop(name)
        self._arriving.append(routes_TLK)
        return routes_TLK

    def finish_copies(self) -> None:
        """Wait until all that was taken is there.

        Raises:
            RuntimeError: vLLM has computed tokens whose experts nobody heard of.
        """
        if self._routes_SLK.device.type != "cpu":
            torch.cuda.current_stream(self._routes_SLK.device).synchronize()
        arrived, self._arriving = self._arriving, []
        if any((routes_TLK[[0, -2]] == self.unknown).any() for routes_TLK in arrived):  # of prompt and response
            raise RuntimeError("vLLM has computed tokens without telling which experts they took")

    def forget(self, names: Sequence[str]) -> None:
        """Forget sequences that were given up, of which some had not begun."""
        for name in names:
            self._ended.pop(name, None)

    def _hear(self, layer: int, experts_NK: torch.Tensor) -> None:
        if (slot_N := versions.slots_of_step()) is not None:
            put_by_slot(self._routes_SLK, layer, slot_N, experts_NK)

    def _keep(self, name: str, slot_T: np.ndarray, tokens: int) -> None:
        """Keep what a sequence has before its slots are another's; one that is only interrupted is kept again later."""
        stored_SLK = self._routes_SLK
        on_gpu = stored_SLK.device.type != "cpu"
        routes_TLK = torch.empty((tokens, *stored_SLK.shape[1:]), dtype=self._dtype, pin_memory=on_gpu)
        routes_TLK[len(slot_T) :] = self._nothing
        computed_TLK = stored_SLK.index_select(0, to_device(slot_T, stored_SLK.device))
        routes_TLK[: len(slot_T)].copy_(computed_TLK, non_blocking=True)
        kept_TLK = routes_TLK.numpy()
        self._ended[name] = kept_TLK.view(f"u{kept_TLK.itemsize}")
