"""Records which experts of a mixture each token takes in vLLM, so that training can replay them.

They are kept as keys and values are: by the slot of the KV cache that a token has. So tokens that a prompt shares with
another one, and that are found in the prefix cache instead of computed, bring the experts of the pass that computed
them, and it does not matter in which pieces a prompt is computed. vLLM's own (`enable_return_routed_experts`) is a part
of its model runner for GPUs, and asks a scheduler that sequences coast past (penstock/engines/rollout/scheduler.py).

Suffixes: `_T` tokens of one sequence, `_S` slots of the KV cache, `_NK` tokens of a step times experts of each,
`_TLK` tokens times layers with experts times experts of each.
Left out: GPUs, whose CUDA graphs this has not been tried with; the replay (penstock/engines/models/replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.base.errors import UserError
from penstock.engines.families.routing import NO_REPLAY_ON_GPUS
from penstock.engines.rollout import vllm as versions


class RouteCapture:
    """The experts of all tokens that a vLLM engine keeps keys of, and those of sequences that have ended.

    Args:
        llm: an in-process vLLM engine that is idle.
        experts: of a layer.

    Raises:
        UserError: it is on a GPU, or its model has other attention than over all keys.
        RuntimeError: this version of vLLM does not let its routers be heard.
    """

    def __init__(self, llm: Any, experts: int) -> None:
        if torch.cuda.is_available():
            raise UserError(*NO_REPLAY_ON_GPUS)
        routers, slots = versions.routers(llm), versions.kv_slots(llm)
        if slots is None:
            raise UserError(
                "actor.routing=replay needs attention over all keys, and some layers of this model have windows",
                "remove it",
            )
        self.unknown = np.iinfo(np.uint8).max if experts <= np.iinfo(np.uint8).max else np.iinfo(np.uint16).max
        # PyTorch puts nothing into uint16 on a CPU: the same bytes are int16 here.
        dtype = torch.uint8 if self.unknown == np.iinfo(np.uint8).max else torch.int16
        # One slot more: the last one is where vLLM puts what is no token, slot -1.
        self._routes_SLK = torch.zeros((slots + 1, len(routers), routers[0].top_k), dtype=dtype)
        self._ended: dict[str, np.ndarray] = {}
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._hear, layer))
        versions.before_blocks_are_freed(llm, self._keep)

    def take(self, name: str) -> np.ndarray:
        """Return the experts_TLK of an ended sequence, once; of its last token, which was never computed: unknown."""
        return self._ended.pop(name)

    def forget(self, names: Sequence[str]) -> None:
        """Forget sequences that were given up, of which some had not begun."""
        for name in names:
            self._ended.pop(name, None)

    def _hear(self, layer: int, experts_NK: torch.Tensor) -> None:
        slot_N = versions.slots_of_step()
        self._routes_SLK[slot_N, layer] = experts_NK.to(self._routes_SLK.dtype)

    def _keep(self, name: str, slot_T: np.ndarray, tokens: int) -> None:
        """Keep what a sequence has before its slots are another's; one that is only interrupted is kept again later."""
        computed_TLK = self._routes_SLK[torch.from_numpy(slot_T)].numpy()
        computed_TLK = computed_TLK.view(f"u{computed_TLK.itemsize}")
        routes_TLK = np.full((tokens, *computed_TLK.shape[1:]), self.unknown, computed_TLK.dtype)
        routes_TLK[: len(computed_TLK)] = computed_TLK
        self._ended[name] = routes_TLK
