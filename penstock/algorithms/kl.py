"""Estimates of the KL divergence from samples, and the controller that adapts its coefficient.

Sources: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); Ziegler et al. 2019 (arXiv
1909.08593), section 2.2. Used by the flow on numpy arrays (a penalty in the reward) and by the engines on tensors (a
penalty in the loss).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from penstock.algorithms.segments import Array

KL_ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "abs", "k1+", "k3+")
# e^20 is 5e8: far beyond any ratio that means something, far below where float32 overflows (e^88).
LOG_RATIO_BOUND = 20.0
# Ziegler et al.: the proportional error is clipped to this, either way.
ERROR_BOUND = 0.2


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """KL(policy || reference) per token from tokens sampled by the policy; any one shape, returned as it came.

    With x = log reference - log policy: k1 = -x is unbiased and may be negative; k2 = x^2 / 2 is biased, of low
    variance; k3 = e^x - 1 - x is unbiased, of low variance, never negative. k3 computes with x bounded to +-20, and
    passes no gradient beyond: bounding e^x alone would leave the gradient of -x, which points away from the
    reference. The gradient of an estimate is not an estimate of the gradient: in a loss, k2 follows the gradient of
    KL(policy || reference), k1 has gradient 0 in expectation. Hence k1+ and k3+: the value of k1 or k3, with the
    gradient of k2 passed straight through. abs = |x| is not an estimate of the divergence, but a distance.

    Raises:
        ValueError: the estimator is none of ``KL_ESTIMATORS``.
    """
    if estimator.endswith("+") and estimator in KL_ESTIMATORS:
        return _straight_through(logprobs, reference_logprobs, estimator[:-1])
    x = reference_logprobs - logprobs
    match estimator:
        case "k1":
            return -x
        case "k2":
            return 0.5 * x * x
        case "abs":
            return abs(x)
        case "k3":
            x = x.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            # expm1 keeps the digits that e^x - 1 loses near 0, where x is on most tokens.
            return (np.expm1(x) if isinstance(x, np.ndarray) else x.expm1()) - x
    raise ValueError(f"unknown KL estimator {estimator!r}; there are {', '.join(KL_ESTIMATORS)}")


def _straight_through(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    value = kl_estimate(logprobs, reference_logprobs, estimator)
    if isinstance(logprobs, np.ndarray):  # no gradient to speak of
        return value
    k2 = kl_estimate(logprobs, reference_logprobs, "k2")
    return value.detach() + (k2 - k2.detach())


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that steers the observed divergence to a target.

    Args:
        coefficient: factor of the KL penalty now.
        target: the divergence wanted, in the unit of ``observed_kl``.
        horizon: samples over which a full error would change the coefficient by 20 %.
        ceiling: what the coefficient never exceeds.
    """

    coefficient: float
    target: float
    horizon: float
    ceiling: float

    def update(self, observed_kl: float, samples: int) -> AdaptiveKL:
        """coefficient (1 + clip(observed / target - 1, +-0.2) samples / horizon), and at most the ceiling.

        samples / horizon counts as 1 at most: beyond 5 the factor would turn negative and reward divergence.

        Raises:
            ValueError: ``observed_kl`` is NaN.
        """
        if math.isnan(observed_kl):
            raise ValueError("the observed KL divergence is NaN: the log-probabilities it came from are broken")
        error = min(max(observed_kl / self.target - 1, -ERROR_BOUND), ERROR_BOUND)
        factor = 1 + error * min(samples / self.horizon, 1)
        return replace(self, coefficient=min(self.coefficient * factor, self.ceiling))
