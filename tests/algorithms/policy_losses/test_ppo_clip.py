"""The clipped policy loss against numbers worked out by hand, a scalar loop, and finite differences.

Invariants: on-policy the ratio is exactly 1 and the gradient exactly -A / N; nothing overflows.
"""

from __future__ import annotations

import math

import pytest
import torch

from penstock.algorithms.aggregation import Denominators, aggregate
from penstock.algorithms.policy_losses.ppo_clip import ppo_clip
from penstock.algorithms.policy_losses.types import PolicyLossInputs


def inputs_of(log_ratios: list[float], advantages: list[float], dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
    """One row whose old log-probabilities are 0, so that the log-probabilities are the log-ratios."""
    logprobs_T = torch.tensor(log_ratios, dtype=dtype, requires_grad=True)
    return PolicyLossInputs(
        logprobs_T=logprobs_T,
        old_logprobs_T=torch.zeros_like(logprobs_T).detach(),
        advantages_T=torch.tensor(advantages, dtype=dtype),
        mask_T=torch.ones(len(log_ratios), dtype=dtype),
        offsets_B1=torch.tensor([0, len(log_ratios)]),
    )


def logs(ratios: list[float]) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def looped(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """Equation 7 of PPO and equation 5 of dual clip as objectives, for one token."""
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def test_by_hand() -> None:
    """clip 0.2 below, 0.3 above, dual clip 3.

    ratio 1.5, A  2: min(3, 2.6)       -> -2.6, clipped
    ratio 0.5, A  2: min(1, 1.6)       -> -1
    ratio 1.5, A -2: min(-3, -2.6)     ->  3
    ratio 0.5, A -2: min(-1, -1.6)     ->  1.6, clipped
    ratio 5,   A -2: max(-10, 3 * -2)  ->  6, clipped by the dual clip
    ratio 1.1, A -2: inside            ->  2.2
    """
    outputs = ppo_clip(
        inputs_of(logs([1.5, 0.5, 1.5, 0.5, 5, 1.1]), [2, 2, -2, -2, -2, -2]), clip_low=0.2, clip_high=0.3, dual_clip=3
    )
    expected = torch.tensor([-2.6, -1, 3, 1.6, 6, 2.2], dtype=torch.float64)
    torch.testing.assert_close(outputs.loss_T, expected, rtol=0, atol=1e-12)
    assert outputs.metrics_T["clip_fraction"].tolist() == [1, 0, 0, 1, 1, 0]


def test_metrics_by_hand() -> None:
    """ratio 2: k3 of the old policy from the actor, r - 1 - log r = 1 - log 2 = 0.306853; all metrics detached."""
    metrics_T = ppo_clip(inputs_of(logs([2.0, 1.0]), [1, 1])).metrics_T
    assert set(metrics_T) == {"clip_fraction", "ratio", "approx_kl"}
    torch.testing.assert_close(metrics_T["ratio"], torch.tensor([2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(metrics_T["approx_kl"], torch.tensor([0.3068528194400547, 0.0], dtype=torch.float64))
    assert not any(metric_T.requires_grad for metric_T in metrics_T.values())


@pytest.mark.parametrize("dual_clip", [None, 1.5, 3.0])
def test_random_tokens_equal_a_scalar_loop(dual_clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratios = torch.randn(500, generator=generator, dtype=torch.float64).tolist()
    advantages = torch.randn(500, generator=generator, dtype=torch.float64).tolist()
    outputs = ppo_clip(inputs_of(log_ratios, advantages), clip_low=0.1, clip_high=0.4, dual_clip=dual_clip)
    expected = [looped(math.exp(x), a, 0.1, 0.4, dual_clip) for x, a in zip(log_ratios, advantages, strict=True)]
    torch.testing.assert_close(outputs.loss_T, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("clips", [{}, {"clip_low": 0.0, "clip_high": 0.0}, {"dual_clip": 3.0}])
def test_on_policy_ratio_is_exactly_one_and_gradient_exactly_minus_a_over_n(
    dtype: torch.dtype, clips: dict[str, float]
) -> None:
    """Also where the bounds coincide with the ratio, and where both branches of the minimum tie."""
    generator = torch.Generator().manual_seed(1)
    logprobs_T = (-5 * torch.rand(64, generator=generator)).to(dtype).requires_grad_()
    advantages_T = torch.randn(64, generator=generator).to(dtype)
    offsets_B1 = torch.tensor([0, 64])
    inputs = PolicyLossInputs(logprobs_T, logprobs_T.detach(), advantages_T, torch.ones(64, dtype=dtype), offsets_B1)
    outputs = ppo_clip(inputs, **clips)
    assert (outputs.metrics_T["ratio"] == 1).all()
    assert (outputs.metrics_T["approx_kl"] == 0).all()
    assert (outputs.metrics_T["clip_fraction"] == 0).all()
    denominators = Denominators(tokens=64, sequences=1, max_tokens=64)
    aggregate(outputs.loss_T, inputs.mask_T, offsets_B1, "token-mean", denominators).backward()
    assert torch.equal(logprobs_T.grad, -advantages_T / 64)


def test_control_off_policy_the_gradient_differs() -> None:
    """Negative control: old log-probabilities that are off by 1e-3 show in the ratio and in the gradient."""
    inputs = inputs_of([1e-3], [1.0])
    outputs = ppo_clip(inputs)
    outputs.loss_T.sum().backward()
    assert outputs.metrics_T["ratio"].item() != 1
    assert inputs.logprobs_T.grad.item() != -1


def test_the_gradient_stops_exactly_where_a_clip_decides() -> None:
    inputs = inputs_of(logs([1.5, 0.5, 1.5, 0.5, 5]), [2, 2, -2, -2, -2])
    outputs = ppo_clip(inputs, dual_clip=3)
    outputs.loss_T.sum().backward()
    assert ((inputs.logprobs_T.grad == 0) == outputs.metrics_T["clip_fraction"].bool()).all()
    assert outputs.metrics_T["clip_fraction"].tolist() == [1, 0, 0, 1, 1]


def test_extreme_log_ratios_stay_finite_and_pass_no_gradient() -> None:
    """Negative control: without the bound float32 overflows at the same log-ratio."""
    inputs = inputs_of([200.0, -200.0, 200.0, -200.0], [1, 1, -1, -1], dtype=torch.float32)
    outputs = ppo_clip(inputs)
    outputs.loss_T.sum().backward()
    assert outputs.loss_T.isfinite().all()
    assert (inputs.logprobs_T.grad == 0).all()
    assert inputs.logprobs_T[0].exp().isinf()


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_gradcheck(dual_clip: float | None) -> None:
    base = inputs_of([-2.0, -0.15, 0.05, 0.15, 0.5, 1.5, -2.0, -0.15, 0.15, 0.5, 1.5], [1.0] * 6 + [-1.0] * 5)

    def loss(logprobs_T: torch.Tensor) -> torch.Tensor:
        inputs = PolicyLossInputs(logprobs_T, base.old_logprobs_T, base.advantages_T, base.mask_T, base.offsets_B1)
        return ppo_clip(inputs, dual_clip=dual_clip).loss_T

    assert torch.autograd.gradcheck(loss, (base.logprobs_T,))


def test_a_dual_clip_not_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="has to exceed 1"):
        ppo_clip(inputs_of([0.0], [1.0]), dual_clip=1.0)


def test_an_empty_micro_batch() -> None:
    inputs = inputs_of([], [])
    assert ppo_clip(inputs, dual_clip=3).loss_T.shape == (0,)
