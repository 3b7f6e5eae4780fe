"""DeepSpeed's float32 sums of gradients around a model, without a process group, for tests of what adds to them."""

from __future__ import annotations

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from penstock.engines.weights.layout import family_in, flatten_in_place, in_plan_order


def sums_of(policy: nn.Module, beside: bool = True) -> tuple[BF16_Optimizer, dict[str, Tensor]]:
    """Return an optimizer and its sums by name, as DeepSpeed has them: views of one buffer, as the weights are.

    They lie as the trainer has them, those of the same input `beside` each other, or the other way round.
    """
    named = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    trained = in_plan_order(named, family_in(policy))
    trained = trained if beside else dict(reversed(trained.items()))
    flatten_in_place(list(trained.values()))
    sizes = [parameter.numel() for parameter in trained.values()]
    optimizer = BF16_Optimizer.__new__(BF16_Optimizer)
    optimizer.bf16_groups = [list(trained.values())]
    optimizer.fp32_groups_gradients = [list(torch.zeros(sum(sizes)).split(sizes))]
    return optimizer, dict(zip(trained, optimizer.fp32_groups_gradients[0], strict=True))
