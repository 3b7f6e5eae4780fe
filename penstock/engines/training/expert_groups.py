"""What DeepSpeed has to know of experts that lie on several ranks.

Their gradients are complete as the backward pass makes them (penstock/engines/kernels/expert_parallel.py), but for sets
of ranks beside each other, which hold the same experts: over these DeepSpeed sums and shards them, instead of over all
ranks. It finds experts by attributes of parameters and of the optimizer's groups, and a model that has some by a module
of its class. Left out: what a rank holds (penstock/engines/weights/experts.py).
"""

from __future__ import annotations

from typing import Any, cast

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from penstock.engines.weights.experts import cut_of, cut_parameters


class ExpertGroups(MoE):
    """Without parameters: it makes the process groups when DeepSpeed looks for modules that want some."""

    def __init__(self, experts: int, ranks: int) -> None:
        nn.Module.__init__(self)
        self.num_experts, self._ranks = experts, ranks

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make groups of as many consecutive ranks as `expert_parallel` says, as the exchange has them."""
        groups._create_expert_and_data_parallel(self._ranks)


def tell_deepspeed(module: nn.Module) -> None:
    """Mark a model's experts if they lie on several ranks, before DeepSpeed takes it."""
    for parameter in cut_parameters(module).values():
        cut, marked = cut_of(parameter), cast(Any, parameter)
        assert cut is not None
        marked.allreduce, marked.group_name = False, f"ep_size_{cut.ranks.count}"
        module.expert_groups = ExpertGroups(cut.shape[0], cut.ranks.count)
