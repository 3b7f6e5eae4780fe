"""Routing replay (R3): in training a token takes the experts that it took in the rollout.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370).
Routers compute their logits as ever, and weigh the replayed experts by them as their family does, so they learn; only
which experts these are is the rollout's. Where that is not known, as of a response's last token, which no engine passes
through the model, a router takes its own.

Suffixes: `_N` tokens of a micro-batch, `_K` experts of each, `_NE` times all experts, `_NW` times layers and `_K`.
Left out: how the rollout's are recorded (penstock/engines/rollout/routing/capture.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.engines.families.routing import weights_add_up_to_one

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits_NE, weights_NK and experts_NK


class Replay:
    """The routers of a model, which from now on take the experts that they are given.

    Args:
        lm: a mixture of experts of the transformers library, of a type in `REPLAYED`.
    """

    def __init__(self, lm: Any) -> None:
        kind = lm.base_model._can_record_outputs["router_logits"].target_class  # the library's own word for its routers
        normed = weights_add_up_to_one(lm.config.to_dict())
        self._routers = [_Router(module, normed) for module in lm.modules() if isinstance(module, kind)]

    def give(self, routes_NW: torch.Tensor | None) -> None:
        """Set what the next passes take, also blocks that are computed again for the backward pass; None: their own."""
        if routes_NW is None:
            for router in self._routers:
                router.routes_NK = None
            return
        for router, routes_NK in zip(self._routers, routes_NW.chunk(len(self._routers), dim=1), strict=True):
            router.routes_NK = routes_NK

    def mismatch(self) -> torch.Tensor:
        """Return the share of the replayed experts, of all layers, that the routers would not have chosen."""
        return torch.stack([router.mismatch for router in self._routers]).mean()


class _Router:
    """A router of the library's whose `forward` is replaced."""

    def __init__(self, module: nn.Module, normed: bool) -> None:
        self._library, self._normed = module.forward, normed
        self.routes_NK: torch.Tensor | None = None
        self.mismatch = torch.zeros(())
        module.forward = self._forward

    def _forward(self, hidden_states: torch.Tensor) -> Routed:
        logits_NE, weights_NK, own_NK = self._library(hidden_states)
        if self.routes_NK is None:
            return logits_NE, weights_NK, own_NK
        known_N1 = self.routes_NK[:, :1] >= 0
        routes_NK = torch.where(known_N1, self.routes_NK.long(), own_NK)
        self.mismatch = _mismatch(routes_NK, own_NK, known_N1)
        probabilities_NE = logits_NE.softmax(-1, dtype=torch.float)
        # In the order of a router's own choice: where that is the same, so are all sums to the last bit.
        taken_NK, order_NK = probabilities_NE.gather(-1, routes_NK).sort(stable=True, dim=-1, descending=True)
        if self._normed:
            taken_NK = taken_NK / taken_NK.sum(-1, keepdim=True)
        return logits_NE, taken_NK.to(weights_NK.dtype), routes_NK.gather(-1, order_NK)


def _mismatch(routes_NK: torch.Tensor, own_NK: torch.Tensor, known_N1: torch.Tensor) -> torch.Tensor:
    """Return the share of the known routes that are not among a token's own."""
    others_NK = (routes_NK[:, :, None] != own_NK[:, None, :]).all(-1)
    return others_NK.sum() / (known_N1.sum() * own_NK.shape[1]).clamp(min=1)
