"""A mixture of the transformers library whose experts lie on several ranks.

A layer's module of experts stays the library's, with fewer experts: it is given the tokens that all ranks have for
these. Routers, and whatever else a layer has, are whole on every rank. Left out: how tokens travel
(penstock/engines/kernels/expert_parallel.py), how experts are trained (penstock/engines/training/expert_groups.py).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from penstock.engines.batches.shares import RankSet
from penstock.engines.kernels.expert_parallel import take_experts
from penstock.engines.weights.experts import cut_parameter, stacks_of_experts


def cut_experts(lm: nn.Module, ranks: RankSet) -> None:
    """Leave in a model this rank's part of every layer's experts; tokens go to the others from then on.

    Args:
        ranks: how many of them divides the number of experts.
    """
    for experts in stacks_of_experts(lm).values():
        for name, parameter in [*experts.named_parameters()]:
            setattr(experts, name, cut_parameter(parameter, ranks))
        experts.num_experts //= ranks.count
        experts.forward = partial(take_experts, ranks, experts.num_experts, experts.forward)
