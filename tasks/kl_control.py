"""The KL coefficient of the next iteration: fixed, or adapted to the divergence just observed."""

from __future__ import annotations

import math

from algorithms.kl import AdaptiveKL
from tasks.session import Training
from tasks.settings import Settings


def next_kl_coefficient(training: Training, settings: Settings, metrics: dict[str, float]) -> float | None:
    """Return the coefficient to use next and record the one used; None without an adaptive controller."""
    kl = training.config.algorithm.kl
    if kl is None:
        return None
    metrics["kl/coefficient"] = settings.kl_coefficient
    if kl.target is None or kl.horizon is None or kl.ceiling is None:
        return None
    # No step was taken and no pass gave both log-probs, or what they gave says nothing.
    if not math.isfinite(metrics.get("actor/kl", math.nan)):
        return settings.kl_coefficient
    controller = AdaptiveKL(settings.kl_coefficient, kl.target, kl.horizon, kl.ceiling)
    samples = training.config.rollout.prompts * training.config.rollout.samples
    return controller.update(metrics["actor/kl"], samples).coefficient
