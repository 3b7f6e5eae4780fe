"""KL estimates and the adaptive coefficient against numbers worked out by hand.

Invariants: numpy and torch agree; k1 and k3 have the divergence itself as expectation; equal policies give exactly
0; the coefficient stays positive and below its ceiling.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from penstock.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_estimate

LOG2 = 0.6931471805599453
# Policy twice, half and as likely as the reference: x = -log 2, log 2, 0.
POLICY = np.log([0.5, 0.25, 0.4])
REFERENCE = np.log([0.25, 0.5, 0.4])
BY_HAND = {
    "k1": [LOG2, -LOG2, 0],
    "k2": [0.2402265069591007, 0.2402265069591007, 0],
    "k3": [0.5 - 1 + LOG2, 2 - 1 - LOG2, 0],
    "abs": [LOG2, LOG2, 0],
}
BY_HAND |= {"k1+": BY_HAND["k1"], "k3+": BY_HAND["k3"]}


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_by_hand_in_numpy_and_torch(estimator: str) -> None:
    estimate = kl_estimate(POLICY, REFERENCE, estimator)
    assert isinstance(estimate, np.ndarray)
    np.testing.assert_allclose(estimate, BY_HAND[estimator], rtol=0, atol=1e-15)
    tensor = kl_estimate(torch.from_numpy(POLICY), torch.from_numpy(REFERENCE), estimator)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_allclose(tensor.numpy(), BY_HAND[estimator], rtol=0, atol=1e-15)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_shape_and_dtype_are_kept_and_equal_policies_give_exactly_zero(estimator: str) -> None:
    logprobs = np.linspace(-9, 0, 6, dtype=np.float32).reshape(2, 3)
    estimate = kl_estimate(logprobs, logprobs, estimator)
    assert (estimate.shape, estimate.dtype) == ((2, 3), np.float32)
    assert not estimate.any()


def test_expectations_over_all_outcomes() -> None:
    """Under a small distribution k1 and k3 average to the KL divergence; negative control: k2 does not."""
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    expectation = {name: policy @ kl_estimate(np.log(policy), np.log(reference), name) for name in KL_ESTIMATORS}
    assert expectation["k1"] == pytest.approx(divergence, abs=1e-15)
    assert expectation["k3"] == pytest.approx(divergence, abs=1e-15)
    assert abs(expectation["k2"] - divergence) > 0.01


def test_k3_keeps_its_digits_in_float32() -> None:
    """At x = 1e-3 the truth is 5.0017e-7; negative control: e^x - 1 - x in float32 is off by more than 1 %."""
    x = np.array([1e-3], dtype=np.float32)
    truth = np.exp(x.astype(np.float64)) - 1 - x
    assert kl_estimate(np.zeros_like(x), x, "k3") == pytest.approx(truth, rel=1e-3)
    assert np.exp(x) - 1 - x != pytest.approx(truth, rel=1e-2)


def test_k3_is_never_negative_and_stays_finite() -> None:
    x = np.concatenate([np.logspace(-30, 2.5, 2000), -np.logspace(-30, 2.5, 2000)]).astype(np.float32)
    estimate = kl_estimate(np.zeros_like(x), x, "k3")
    assert np.isfinite(estimate).all()
    assert (estimate >= 0).all()
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(x)).any()


def test_gradients_by_hand() -> None:
    """d/d log p: k1 1; k2 log p - log q; k3 1 - q / p. At x = log 2 and -log 2; none beyond the bound of k3.

    abs has the sign of log p - log q; the straight-through forms have the gradient of k2, also beyond the bound.
    """
    expected = {"k1": [1, 1, 1], "k2": [-LOG2, LOG2, -50], "k3": [1 - 2, 1 - 0.5, 0], "abs": [-1, 1, -1]}
    expected |= {"k1+": expected["k2"], "k3+": expected["k2"]}
    for estimator in KL_ESTIMATORS:
        logprobs = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([LOG2, -LOG2, 50], dtype=torch.float64)
        kl_estimate(logprobs, reference, estimator).sum().backward()
        np.testing.assert_allclose(logprobs.grad.numpy(), expected[estimator], atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])  # the others are not smooth, or not their own gradient
def test_gradcheck(estimator: str) -> None:
    logprobs = torch.from_numpy(POLICY).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, torch.from_numpy(REFERENCE), estimator), (logprobs,))


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; there are k1, k2, k3, abs, k1"):
        kl_estimate(POLICY, REFERENCE, "k4")
    with pytest.raises(ValueError, match="unknown KL estimator 'k2\\+'"):
        kl_estimate(POLICY, REFERENCE, "k2+")


def test_the_gradient_of_the_straight_through_forms_is_that_of_the_divergence() -> None:
    """Expected over all outcomes, by the logits of a small policy; negative control: k1's and k3's own are not."""
    logits = torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits)[0]

    policy = logits.log_softmax(0)
    divergence = gradient((policy.exp() * (policy - reference)).sum())
    for estimator in KL_ESTIMATORS:
        policy = logits.log_softmax(0)
        expected = gradient((policy.detach().exp() * kl_estimate(policy, reference, estimator)).sum())
        same = torch.allclose(expected, divergence, rtol=0, atol=1e-12)
        assert same == (estimator in ("k2", "k1+", "k3+")), estimator


CONTROLLER = AdaptiveKL(coefficient=0.2, target=6.0, horizon=10_000, ceiling=0.21)


@pytest.mark.parametrize(
    ("observed", "samples", "expected"),
    [
        (6.0, 256, 0.2),
        (6.6, 1000, 0.2 * 1.01),  # error 0.1, a tenth of the horizon
        (60.0, 1000, 0.2 * 1.02),  # error clipped to 0.2
        (0.0, 1000, 0.2 * 0.98),  # and to -0.2
        (60.0, 10_000, 0.21),  # 0.24 without the ceiling
        (math.inf, 10_000, 0.21),
    ],
)
def test_update_by_hand(observed: float, samples: int, expected: float) -> None:
    updated = CONTROLLER.update(observed, samples)
    assert updated.coefficient == pytest.approx(expected, rel=1e-15)
    assert updated == dataclasses.replace(CONTROLLER, coefficient=updated.coefficient)
    assert CONTROLLER.coefficient == 0.2


def test_the_coefficient_stays_positive_with_more_samples_than_the_horizon() -> None:
    """Negative control: the plain formula would give 0.2 (1 - 0.2 * 10) < 0."""
    assert 0.2 * (1 - 0.2 * 100_000 / 10_000) < 0
    assert CONTROLLER.update(0.0, 100_000).coefficient == pytest.approx(0.2 * 0.8)


def test_a_coefficient_started_above_the_ceiling_comes_down_to_it() -> None:
    assert dataclasses.replace(CONTROLLER, coefficient=1.0).update(6.0, 1).coefficient == 0.21


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="divergence is NaN"):
        CONTROLLER.update(math.nan, 1)
