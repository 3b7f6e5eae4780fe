"""AdamW with moments of 8 bits (Dettmers et al., arXiv 2110.02861): bitsandbytes' own, its states as ours are kept.

A moment is a code of 8 bits for each number, and a float32 scale for each block of 256 of a parameter. The tables that
give codes their values are constants, so they are no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes import optim

STEP = "step"
TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # a first moment has a sign


class AdamW8bit(optim.AdamW8bit):
    """Its count of steps is a tensor that stays the same, as that of torch's optimizers.

    Args:
        groups: of parameters, with their settings.
        first_states: returns the states of a parameter of a group as they are before the first step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        first_states: Callable[[torch.Tensor, dict[str, Any]], dict[str, torch.Tensor]],
        **given: Any,
    ) -> None:
        super().__init__(groups, **given)
        self._first_states = first_states

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the states of a parameter."""
        self.state[p] |= self._first_states(p, group)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Step a parameter; the library counts in integers, and finds its tables among the states."""
        state = self.state[p]
        count, tables = state[STEP], dict[str, torch.Tensor]()
        if state["state1"].dtype == torch.uint8:
            tables = {name: self.name2qmap[table].to(p.device) for name, table in TABLES.items()}
        self.state[p] = {**state, **tables, STEP: int(count)}
        super().update_step(group, p, gindex, pindex)
        count.fill_(self.state[p][STEP])
        self.state[p] = state
