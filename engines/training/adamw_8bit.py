"""AdamW with moments of 8 bits (Dettmers et al., arXiv 2110.02861): bitsandbytes' own, its states as ours are kept.

A moment is a code of 8 bits for each number, and a float32 scale for each block of 256 of a parameter. The tables that
give codes their values are constants, so they are no state.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import optim

from engines.training.optimizers import BITS, STATES, STEP, first_state

TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # a first moment has a sign


class AdamW8bit(optim.AdamW8bit):
    """Its count of steps is a tensor that stays the same, as that of torch's optimizers."""

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the states of a parameter as they are before the first step."""
        self.state[p] |= {name: first_state(name, p, group) for name in group[STATES]}

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Step a parameter; the library counts in integers, and finds its tables among the states."""
        state = self.state[p]
        count, tables = state[STEP], dict[str, torch.Tensor]()
        if group[BITS] == 8:
            tables = {name: self.name2qmap[table].to(p.device) for name, table in TABLES.items()}
        self.state[p] = {**state, **tables, STEP: int(count)}
        super().update_step(group, p, gindex, pindex)
        count.fill_(self.state[p][STEP])
        self.state[p] = state
