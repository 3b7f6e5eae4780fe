"""How sure a mean over held-out prompts is: percentile bootstrap intervals (Efron 1979).

Prompts are resampled, not responses: responses to one prompt resemble each other, and counting them as independent
would make the interval too narrow. The interval says what other prompts of the same kind would have given; it does
not hold the spread between trainings of different seeds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0  # a fixed one: the same responses have the same interval, and runs on the same prompts the same resamples
_DRAWS_AT_ONCE = 1 << 20


def intervals(values_MP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper end (M each) of the 95 % interval of each row's mean over prompts."""
    prompts = values_MP.shape[1]
    generator = np.random.default_rng(SEED)
    at_once = max(1, _DRAWS_AT_ONCE // prompts)
    means = []
    for start in range(0, RESAMPLES, at_once):
        draws_RP = generator.integers(prompts, size=(min(at_once, RESAMPLES - start), prompts))
        means.append(np.stack([values_P[draws_RP].mean(axis=1) for values_P in values_MP]))
    low_M, high_M = np.quantile(np.concatenate(means, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return low_M, high_M


def with_intervals(figures: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return for each figure (P values) its mean, and the interval's ends as `<name>/low` and `<name>/high`."""
    values_MP = np.stack([np.asarray(values_P, np.float64) for values_P in figures.values()])
    low_M, high_M = intervals(values_MP)
    ends = zip(figures, values_MP.mean(axis=1), low_M, high_M, strict=True)
    return {
        key: float(value)
        for name, mean, low, high in ends
        for key, value in ((name, mean), (f"{name}/low", low), (f"{name}/high", high))
    }
