"""Experts that lie on several ranks (`actor.expert_parallel`): which of them a rank holds, and how all come together.

The transformers library stacks the experts of a layer along the first axis of two parameters. Cut, a parameter holds
consecutive experts of them, in the order of the ranks. It has the whole one's name, and says in its attribute `cut`
what it is a part of; so checkpoints, exports and the reshard know experts by the library's names and shapes, whatever
the number of ranks. Left out: how tokens reach experts (penstock/engines/kernels/expert_parallel.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.engines.batches.shares import RankSet
from penstock.engines.weights.layout import family_in


@dataclass(frozen=True)
class Cut:
    """What a parameter is a part of.

    Attributes:
        ranks: those among which the experts are shared out.
        shape: of all experts together.
    """

    ranks: RankSet
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        """How many numbers of the whole parameter come before this rank's."""
        return math.prod(self.shape) // self.ranks.count * self.ranks.own


def stacks_of_experts(lm: nn.Module) -> dict[str, Any]:
    """Return the modules that hold the experts of a layer, by name; none where the table has no row for them."""
    endings = tuple(f".{own}" for own, _ in family_in(lm).experts)
    stacked = [name for name, value in lm.named_parameters() if value.ndim == 3 and name.endswith(endings)]
    return {name: lm.get_submodule(name) for name in dict.fromkeys(name.rpartition(".")[0] for name in stacked)}


def cut_parameter(parameter: nn.Parameter, ranks: RankSet) -> nn.Parameter:
    """Return this rank's part of a parameter that stacks experts, in memory of its own."""
    held = parameter.shape[0] // ranks.count
    own: Any = nn.Parameter(parameter.data.narrow(0, held * ranks.own, held).clone(), parameter.requires_grad)
    own.cut = Cut(ranks, tuple(parameter.shape))
    part: nn.Parameter = own
    return part


def cut_of(parameter: nn.Parameter) -> Cut | None:
    """Return what a parameter is a part of; None: it is whole here, or a shard of ZeRO-3."""
    return getattr(parameter, "cut", None)


def cut_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name of which this rank holds some experts."""
    return {name: value for name, value in module.named_parameters() if cut_of(value) is not None}


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return a parameter's shape, also while a rank holds a part of it alone."""
    cut = cut_of(parameter)
    return tuple(getattr(parameter, "ds_shape", parameter.shape)) if cut is None else cut.shape


@torch.no_grad()
def all_experts(parameter: nn.Parameter) -> torch.Tensor:
    """Return the experts of all ranks, in new memory; all ranks that share them call it."""
    cut = cut_of(parameter)
    assert cut is not None
    whole = parameter.data.new_empty(cut.shape)
    torch.distributed.all_gather_into_tensor(whole, parameter.data.contiguous(), group=cut.ranks.group)
    return whole
