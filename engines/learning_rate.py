"""The learning rate's shape over optimizer steps: linear warm-up, then constant, linear or cosine. A pure function."""

from __future__ import annotations

import math

from configs.schema import OptimizerConfig


def learning_rate_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the factor on the peak learning rate at `step` (0 for the first).

    Warm-up rises from 1/warmup_steps to 1; the decay goes from 1 to min_ratio at total_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    share = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1.0 - share if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_ratio + (1.0 - config.min_ratio) * shape
