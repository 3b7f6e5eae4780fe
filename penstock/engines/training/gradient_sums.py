"""Where DeepSpeed keeps the sum of a gradient between two optimizer steps: to weigh it, or to leave it.

Each of its optimizers has places of its own, and no interface to them. Between the first backward pass and the step
they hold what the passes so far have given; complete, and over all ranks, only after the last one. Left out: who sums
(penstock/engines/training/trainer.py), products that add to the sums themselves
(penstock/engines/kernels/weight_gradients.py).
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor, nn


def summed_gradient(module: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return this rank's part of the sum, complete after the last backward pass: tensors that the step will read."""
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_gradients_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.offload_optimizer:  # copies in host memory, and norms that were taken of them before
            sums = [master.grad for master in optimizer.fp32_partitioned_groups_flat]
            return [*sums, *optimizer.norm_for_param_grads.values()]
        return [optimizer.grad_partitions_flat_buffer]
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return [tensor for group in optimizer.averaged_gradients.values() for tensor in group]
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def forget_gradient(module: nn.Module, optimizer: Any) -> None:
    """Let the next backward pass be the first of a new sum."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.averaged_gradients = {}
        optimizer.all_grad_tensors = {}
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer.zero_grad()
    module.zero_grad()
