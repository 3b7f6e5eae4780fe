"""Centring and scaling shared by the advantage estimators: over a prompt's group, or over the whole batch.

Numpy, float64. Shapes: _B rows, _G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.base.errors import UserError

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class GroupStatistics:
    """Each row's place in its group.

    Args:
        centred_B: value minus the group's mean, exactly 0 where all values of a group are equal.
        std_B: unbiased standard deviation of the row's group, 0 for a group of one.
        sizes_B: number of rows of the row's group.
    """

    centred_B: np.ndarray
    std_B: np.ndarray
    sizes_B: np.ndarray


def centred(values: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Values minus the (weighted) mean over equal ``groups``, float64; exactly 0 where all values of a group are equal.

    Args:
        values: any one-dimensional array.
        groups: an integer per value; equal ones need not be neighbours.
        weights: not negative; None for equal weights. A group whose weights sum to 0 is centred with equal ones.
    """
    _, first_G, group, sizes_G = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    values = values.astype(np.float64)
    # Measured from a member of the group, equal values are exact zeros: their mean carries no rounding error, which
    # a division by a vanishing standard deviation would blow up.
    shifted = values - values[first_G][group]
    if weights is None:
        return shifted - (np.bincount(group, weights=shifted) / sizes_G)[group]
    total_G = np.bincount(group, weights=weights)
    weights = np.where(total_G[group] > 0, weights, 1.0)
    total_G = np.where(total_G > 0, total_G, sizes_G)
    return shifted - (np.bincount(group, weights=shifted * weights) / total_G)[group]


def group_statistics(values_B: np.ndarray, groups_B: np.ndarray) -> GroupStatistics:
    """Statistics of ``values_B`` over rows of equal ``groups_B``; rows of a group need not be neighbours.

    Raises:
        UserError: a group's variance is not finite; a division by it would make every advantage 0.
    """
    _, group_B, sizes_G = np.unique(groups_B, return_inverse=True, return_counts=True)
    centred_B = centred(values_B, groups_B)
    variance_G = np.bincount(group_B, weights=centred_B**2) / np.maximum(sizes_G - 1, 1)
    _check_variance(variance_G)
    return GroupStatistics(centred_B, np.sqrt(variance_G)[group_B], sizes_G[group_B])


def whitened(values: np.ndarray) -> np.ndarray:
    """Shift and scale to mean 0 and unbiased variance 1; given the counted tokens of a batch and nothing else.

    The divisor is sqrt(variance + 1e-8), so that equal values, or a single one, become exactly 0.

    Raises:
        UserError: the variance is not finite.
    """
    if not values.size:
        return values
    shifted = values - values[0]  # as in `centred`: equal values leave no rounding error
    centred_values = shifted - shifted.mean()
    variance = (centred_values @ centred_values) / max(values.size - 1, 1)
    _check_variance(variance)
    return centred_values / np.sqrt(variance + WHITEN_EPSILON)


def _check_variance(variance: np.ndarray) -> None:
    if not np.isfinite(variance).all():
        raise UserError(
            "advantages cannot be computed: the variance of what they are made of is not a finite number",
            "look for rewards, values or weights of parts that are NaN, infinite or too large to be squared",
        )
