"""The KL over the whole vocabulary is its definition, with the gradient of its definition, chunk by chunk.

The other side is float64: the definition in NumPy, torch's own differentiation by finite differences.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engines.kernels import lm_head as logprobs
from penstock.engines.kernels.lm_head import Reference, selected_logprobs, selected_logprobs_and_kl

T, H, V, TEMPERATURE = 7, 5, 11, 0.7
LOG2 = math.log(2)


@pytest.fixture(autouse=True)
def three_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models' float64 logits of three tokens: the last chunk holds one token."""
    monkeypatch.setattr(logprobs, "LOGITS_CHUNK_BYTES", 2 * 3 * V * 8)


def made(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Reference]:
    """Hidden states, language head, targets and a reference, random in float64."""
    draw = torch.Generator().manual_seed(seed)
    states, head, other_states, other_head = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((T, H), (V, H)) * 2
    )
    targets = torch.randint(V, (T,), generator=draw)
    return states.requires_grad_(), head.requires_grad_(), targets, Reference(other_states, other_head)


def log_softmax(states: np.ndarray, head: np.ndarray) -> np.ndarray:
    logits_TV = states @ head.T / TEMPERATURE
    return logits_TV - np.log(np.exp(logits_TV - logits_TV.max()).sum(-1, keepdims=True)) - logits_TV.max()


def test_values_are_the_definitions() -> None:
    """And log-probs and entropies are those without a reference. Control: the reverse KL is another number."""
    states_TH, head_VH, targets_T, reference = made()
    chosen_T, entropies_T, kl_T = selected_logprobs_and_kl(states_TH, head_VH, targets_T, TEMPERATURE, reference)
    p, q = (
        log_softmax(*(value.detach().numpy() for value in pair))
        for pair in ((states_TH, head_VH), (reference.hidden_TH, reference.weight_VH))
    )
    np.testing.assert_allclose(kl_T.detach(), (np.exp(p) * (p - q)).sum(-1), rtol=0, atol=1e-12)
    assert np.abs((np.exp(p) * (p - q)).sum(-1) - (np.exp(q) * (q - p)).sum(-1)).min() > 0.01
    alone = selected_logprobs(states_TH, head_VH, targets_T, TEMPERATURE)
    for value, expected in zip((chosen_T, entropies_T), alone, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_by_hand() -> None:
    """p = 1/2, 1/4, 1/4 and q = 1/4, 1/4, 1/2: a half of log 2 less a quarter of it. One to one with itself: 0."""
    p, q = torch.tensor([[2.0, 1, 1]]).log(), torch.tensor([[1.0, 1, 2]]).log()
    head, target = torch.eye(3), torch.zeros(1, dtype=torch.int64)
    assert selected_logprobs_and_kl(p, head, target, 1.0, Reference(q, head))[2].item() == pytest.approx(LOG2 / 4)
    assert selected_logprobs_and_kl(p, head, target, 1.0, Reference(p, head))[2].item() == 0


def test_gradients_are_those_of_finite_differences() -> None:
    """Of all three outputs together and of the KL alone, by hidden states and head."""
    states_TH, head_VH, targets_T, reference = made()

    def outputs(states_TH: Tensor, head_VH: Tensor) -> tuple[Tensor, ...]:
        return selected_logprobs_and_kl(states_TH, head_VH, targets_T, TEMPERATURE, reference)

    assert torch.autograd.gradcheck(outputs, (states_TH, head_VH))
    assert torch.autograd.gradcheck(lambda *inputs: outputs(*inputs)[2], (states_TH, head_VH))


def test_equal_models_have_exactly_no_divergence_and_no_gradient_from_it() -> None:
    """Bit for bit, in float32 and bfloat16. Control: one changed weight shows."""
    for dtype in (torch.float32, torch.bfloat16):
        states_TH, head_VH = (value.detach().to(dtype) for value in made()[:2])
        trained_TH, targets_T = states_TH.clone().requires_grad_(), made()[2]
        kl_T = selected_logprobs_and_kl(trained_TH, head_VH, targets_T, 1.0, Reference(states_TH, head_VH))[2]
        kl_T.sum().backward()
        assert trained_TH.grad is not None
        assert kl_T.abs().max() == trained_TH.grad.abs().max() == 0
        head_VH[0, 0] += 0.5
        moved_T = selected_logprobs_and_kl(
            trained_TH, made()[1].to(dtype), targets_T, 1.0, Reference(states_TH, head_VH)
        )[2]
        assert moved_T.abs().max() > 1e-3
