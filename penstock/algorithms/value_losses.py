"""The critic's loss and how well its values explain the returns.

Sources: Schulman et al. 2017 (arXiv 1707.06347) for the squared error; the clip is that of its reference
implementation (OpenAI Baselines, ppo2). Averaging over tokens is left to ``penstock.algorithms.aggregation``.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); without a clip 0.5 (V - R)^2.

    Returns:
        The loss, and 1.0 where the clip decided it and so stopped the gradient (detached), both _T.
    """
    unclipped_T = 0.5 * (values_T - returns_T).square()
    if clip is None:
        return unclipped_T, unclipped_T.new_zeros(unclipped_T.shape)
    near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    near_loss_T = 0.5 * (near_T - returns_T).square()
    return unclipped_T.maximum(near_loss_T), (near_loss_T > unclipped_T).to(unclipped_T.dtype)


def explained_variance(values_T: np.ndarray, returns_T: np.ndarray, mask_T: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over counted tokens: 1 is perfect, 0 as good as a constant, below 0 worse.

    NaN where the returns do not vary or none is counted: there is nothing to explain.
    """
    counted_T = mask_T > 0
    returns = returns_T[counted_T].astype(np.float64)
    if not returns.size or np.ptp(returns) == 0:
        return float("nan")
    return float(1 - np.var(returns - values_T[counted_T]) / np.var(returns))
