"""The balance of experts: the library's loss, of one layer; lowest where all are used alike, and its gradient evens."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from penstock.algorithms.expert_balance import expert_balance

TOKENS, EXPERTS = 64, 8


def random_logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_the_loss_is_the_librarys_of_one_layer(chosen: int) -> None:
    logits_NE = random_logits(chosen)
    theirs = load_balancing_loss_func((logits_NE,), EXPERTS, chosen)
    torch.testing.assert_close(expert_balance(logits_NE, chosen)[0], theirs)


def test_layers_do_not_make_up_for_each_other() -> None:
    """Two layers that each use one half of the experts: even for the library, which looks at their sum."""
    one_NE, other_NE = (torch.full((TOKENS, EXPERTS), -20.0) for _ in range(2))
    half = EXPERTS // 2
    one_NE[:, :half], other_NE[:, half:] = random_logits(0)[:, :half], random_logits(1)[:, half:]
    ours = torch.stack([expert_balance(logits_NE, 1)[0] for logits_NE in (one_NE, other_NE)])
    assert (ours > 1.9).all() and load_balancing_loss_func((one_NE, other_NE), EXPERTS, 1) < 1.3


def test_experts_that_are_used_alike_have_the_lowest_loss_and_a_load_of_1() -> None:
    """Control: all tokens to one expert."""
    even_NE = 20 * torch.eye(EXPERTS).repeat(TOKENS // EXPERTS, 1)
    one_NE = torch.zeros(TOKENS, EXPERTS)
    one_NE[:, 3] = 20
    for logits_NE, expected in ((even_NE, 1.0), (one_NE, float(EXPERTS))):
        loss, load = expert_balance(logits_NE, 1)
        assert loss == pytest.approx(expected, rel=1e-5) and load == pytest.approx(expected)


def test_its_gradient_evens_the_load() -> None:
    logits_NE = (random_logits(5) + torch.linspace(0, 4, EXPERTS)).requires_grad_()
    before = expert_balance(logits_NE, 2)[1]
    for _ in range(200):
        (gradient_NE,) = torch.autograd.grad(expert_balance(logits_NE, 2)[0], logits_NE)
        logits_NE = (logits_NE - 100 * gradient_NE).detach().requires_grad_()
    assert before > 2 and expert_balance(logits_NE, 2)[1] < 1.3
