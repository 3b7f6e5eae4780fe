"""Experts that lie on several ranks (`actor.expert_parallel`), gathered for a reshard, with its proof.

As with ZeRO-3's shards (gather.py): each rank sums its own part, the sums are exchanged once, and compared with the
sums of what arrived.

Suffixes: `_P` parameters, `_PR` times ranks. Left out: which part a rank holds (cuts.py).
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.engines.weights.checksum import range_sums, word_sum
from penstock.engines.weights.copies import Differences
from penstock.engines.weights.cuts import all_experts, cut_of, cut_parameters


class ExpertShards:
    """Experts cut over ranks, gathered a parameter at a time, and the proof of what was gathered."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = cut_parameters(module)
        self._found: dict[str, torch.Tensor] = {}  # sums of what arrived, one of each rank, by parameter

    def gather(self, name: str) -> torch.Tensor:
        """Return the experts of all ranks, and remember the sums of what arrived."""
        parameter = self.parameters[name]
        whole = all_experts(parameter)
        self._found[name] = range_sums(whole.view(-1), parameter.numel(), whole.numel() // parameter.numel())
        return whole

    def differences(self) -> Differences:
        """Compare all that was gathered since the last call with what each rank holds; all ranks call it."""
        names = list(self._found)
        if not names:
            return Differences([], [])
        cut = cut_of(self.parameters[names[0]])
        assert cut is not None
        own_P = torch.stack([word_sum(self.parameters[name].data.view(-1)) for name in names])
        all_RP = own_P.new_empty(cut.ranks.count * len(names))
        torch.distributed.all_gather_into_tensor(all_RP, own_P, group=cut.ranks.group)
        found_PR = torch.stack(list(self._found.values()))
        self._found.clear()
        return Differences(names, list((found_PR != all_RP.view(cut.ranks.count, -1).t()).any(1).unbind()))
