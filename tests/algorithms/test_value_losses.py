"""The critic's loss and explained variance against numbers worked out by hand and finite differences.

Invariants: the clip never lowers the loss, and the gradient is 0 exactly where the clip decides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.algorithms.value_losses import clipped_value_loss, explained_variance


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_by_hand() -> None:
    """Old value 1, clip 0.5.

    V 2,    R 3: unclipped 0.5 * 1;     clipped V 1.5: 0.5 * 2.25 = 1.125, decided by the clip
    V 2,    R 0: unclipped 0.5 * 4 = 2; clipped V 1.5: 0.5 * 2.25
    V 1.25, R 3: inside: 0.5 * 1.75^2 = 1.53125
    V 0,   R -1: unclipped 0.5 * 1;     clipped V 0.5: 0.5 * 2.25 = 1.125, decided by the clip
    """
    values_T, returns_T = float64(2, 2, 1.25, 0), float64(3, 0, 3, -1)
    loss_T, clipped_T = clipped_value_loss(values_T, torch.ones(4, dtype=torch.float64), returns_T, clip=0.5)
    assert loss_T.tolist() == [1.125, 2, 1.53125, 1.125]
    assert clipped_T.tolist() == [1, 0, 0, 1]


def test_without_a_clip_by_hand() -> None:
    loss_T, clipped_T = clipped_value_loss(float64(2, 5), float64(0, 0), float64(3, 1), clip=None)
    assert loss_T.tolist() == [0.5, 8]
    assert clipped_T.tolist() == [0, 0]


def test_random_values_equal_a_scalar_loop_and_the_clip_never_lowers_the_loss() -> None:
    generator = np.random.default_rng(0)
    values_T, old_T, returns_T = generator.normal(size=(3, 300))
    tensors = [torch.from_numpy(array) for array in (values_T, old_T, returns_T)]
    loss_T, clipped_T = clipped_value_loss(*tensors, clip=0.3)
    for token, (value, old, target) in enumerate(zip(values_T, old_T, returns_T, strict=True)):
        near = min(max(value, old - 0.3), old + 0.3)
        assert abs(loss_T[token].item() - 0.5 * max((value - target) ** 2, (near - target) ** 2)) < 1e-12
    plain_T, _ = clipped_value_loss(*tensors, clip=None)
    assert (loss_T >= plain_T - 1e-15).all()
    assert 0 < clipped_T.mean() < 1


def test_gradient_is_stopped_exactly_where_the_clip_decides() -> None:
    """Negative control inside: tokens that the clip does not decide have gradient V - R."""
    values_T = float64(2, 2, 1.25, 0).requires_grad_()
    returns_T = float64(3, 0, 3, -1)
    loss_T, clipped_T = clipped_value_loss(values_T, torch.ones(4, dtype=torch.float64), returns_T, clip=0.5)
    loss_T.sum().backward()
    assert values_T.grad.tolist() == [0, 2, -1.75, 0]
    assert not clipped_T.requires_grad


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradcheck(clip: float | None) -> None:
    values_T = float64(2, 2, 1.25, 0).requires_grad_()
    old_T, returns_T = torch.ones(4, dtype=torch.float64), float64(3, 0, 3, -1)
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old_T, returns_T, clip=clip)[0], (values_T,))


def test_explained_variance_by_hand() -> None:
    """Counted returns 1, 3, 5: variance 8 / 3. Errors 0, 1, -1: variance 2 / 3. So 1 - 2 / 8."""
    returns_T, values_T = np.array([1.0, 3, 99, 5]), np.array([1.0, 2, -99, 6])
    assert explained_variance(values_T, returns_T, np.array([1, 1, 0, 1])) == pytest.approx(0.75, abs=1e-15)


def test_explained_variance_of_perfect_constant_and_opposed_values() -> None:
    """Negative control: opposed values are worse than a constant, 1 - 4."""
    returns_T, mask_T = np.array([1.0, 3, 5]), np.ones(3)
    assert explained_variance(returns_T + 7, returns_T, mask_T) == 1
    assert explained_variance(np.zeros(3), returns_T, mask_T) == 0
    assert explained_variance(-returns_T, returns_T, mask_T) == pytest.approx(-3)


def test_explained_variance_with_nothing_to_explain_is_nan() -> None:
    assert math.isnan(explained_variance(np.array([1.0, 2]), np.array([0.1, 0.1]), np.ones(2)))
    assert math.isnan(explained_variance(np.array([1.0, 2]), np.array([3.0, 4]), np.zeros(2)))
