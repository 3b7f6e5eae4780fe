"""The language head's log-probs by themselves; models/test_models.py and test_full_kl.py have them in a model.

Suffixes: `_CV` tokens x vocabulary, `_TH` tokens x hidden size, `_VH` vocabulary x hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.engines.families.logits import LogitRule
from penstock.engines.kernels import lm_head as logprobs


@pytest.mark.parametrize(("vocabulary", "blocks"), [(320, 5), (4096, 4), (151_936, 1187), (50, 1), (8200, 1)])
def test_statistics_block_by_block_are_those_of_the_whole_vocabulary(vocabulary: int, blocks: int) -> None:
    """Against float64, flat and peaked, with logits far from 0, whose exponentials no float32 could hold.

    Control: without a block's own largest logit they overflow.
    """
    assert vocabulary // logprobs._block(vocabulary) == blocks
    torch.manual_seed(0)
    logits_CV = torch.randn(6, vocabulary) * torch.tensor([[0.0], [1.0], [30.0], [1.0], [1.0], [1000.0]])
    logits_CV[3] += 500
    logits_CV[4] -= 500
    targets_C = torch.arange(6) * (vocabulary // 6)
    chosen_C, (normalizer_C, entropies_C, *_) = logprobs._statistics(
        logits_CV, targets_C, torch.tensor(0.5), None, None
    )
    exact_CV = (logits_CV.double() * 0.5).log_softmax(-1)
    exact_C = -(exact_CV.exp() * exact_CV).sum(-1)
    torch.testing.assert_close(chosen_C.double(), exact_CV[torch.arange(6), targets_C], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropies_C.double(), exact_C, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(normalizer_C.double(), (logits_CV.double() * 0.5).logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert not (logits_CV * 0.5).exp().sum(-1).log().isfinite().all()


@pytest.mark.parametrize("tokens", [1, 39, 40, 41, 100])
def test_chunks_cover_all_tokens_are_of_one_length_and_within_the_limit(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may lack a few tokens, fewer than there are chunks."""
    monkeypatch.setattr(logprobs, "LOGITS_CHUNK_BYTES", 4 * 50 * 40)
    chunks = logprobs._chunks(torch.empty(tokens, 8), torch.empty(50, 8), None)
    lengths = [len(range(tokens)[chunk]) for chunk in chunks]
    assert [index for chunk in chunks for index in range(tokens)[chunk]] == list(range(tokens))
    assert max(lengths) <= 40
    assert len(lengths) == -(-tokens // 40)
    assert max(lengths) - min(lengths) < len(lengths)


@pytest.mark.parametrize(("keep_logits", "products"), [(False, 4), (True, 3)])
def test_kept_logits_spare_a_product_with_the_head(keep_logits: bool, products: int) -> None:
    """The forward pass makes them; without a backward pass that is all there is."""
    hidden_TH, targets_T = torch.ones(50, 16, requires_grad=True), torch.arange(50) % 30
    head_VH = torch.ones(30, 16, requires_grad=True)
    with FlopCounterMode(display=False) as trained:
        logprobs.selected_logprobs(hidden_TH, head_VH, targets_T, 1.0, keep_logits)[0].sum().backward()
    with torch.no_grad(), FlopCounterMode(display=False) as asked:
        logprobs.selected_logprobs(hidden_TH, head_VH, targets_T, 1.0, keep_logits)
    flops = 2 * 50 * 16 * 30
    assert (trained.get_total_flops(), asked.get_total_flops()) == (products * flops, flops)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(0.25), LogitRule(1.0, 1.5), LogitRule(2.0, 0.5)])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_logits_that_a_model_caps_and_scales_have_the_gradients_of_autograd(rule: LogitRule, keep_logits: bool) -> None:
    """Of log-probs, entropies and the divergence from a reference, in float64. Control: without the rule others."""
    torch.manual_seed(0)
    hidden_TH, reference_TH = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    head_VH, targets_T = torch.randn(11, 5, dtype=torch.float64), torch.arange(7)
    weights_3T = torch.randn(3, 7, dtype=torch.float64)

    def plain(hidden_TH: Tensor, head_VH: Tensor) -> list[Tensor]:
        def logprobs_TV(states_TH: Tensor) -> Tensor:
            raw_TV = states_TH @ head_VH.t()
            capped_TV = raw_TV if rule.cap is None else rule.cap * (raw_TV / rule.cap).tanh()
            return (capped_TV * rule.factor / 0.7).log_softmax(-1)

        own_TV = logprobs_TV(hidden_TH)
        other_TV = logprobs_TV(reference_TH).detach()
        probs_TV = own_TV.exp()
        chosen_T = own_TV.gather(-1, targets_T[:, None])[:, 0]
        return [chosen_T, -(probs_TV * own_TV).sum(-1), (probs_TV * (own_TV - other_TV)).sum(-1)]

    def ours(hidden_TH: Tensor, head_VH: Tensor, rule: LogitRule = rule) -> list[Tensor]:
        two = logprobs.selected_logprobs(hidden_TH, head_VH, targets_T, 0.7, keep_logits, None, rule)
        reference = logprobs.Reference(reference_TH, head_VH.detach())
        return [*two, logprobs.selected_logprobs_and_kl(hidden_TH, head_VH, targets_T, 0.7, reference, None, rule)[2]]

    def values_and_gradients(function: Callable[..., list[Tensor]], **options: Any) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in (hidden_TH, head_VH)]
        values = function(*leaves, **options)
        (torch.stack(values) * weights_3T).sum().backward()
        return [*values, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found, expected = values_and_gradients(ours), values_and_gradients(plain)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    if rule != LogitRule():
        assert not torch.allclose(values_and_gradients(ours, rule=LogitRule())[3], expected[3])


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(2.0, 0.5)])
def test_a_heads_bias_has_the_gradient_of_autograd(
    rule: LogitRule, keep_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks, beside a reference with a bias of its own, in float64. Control: without it all are others."""
    monkeypatch.setattr(logprobs, "LOGITS_CHUNK_BYTES", 8 * 11 * 3)
    torch.manual_seed(0)
    hidden_TH, reference_TH = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    head_VH, other_VH, targets_T = torch.randn(11, 5).double(), torch.randn(11, 5).double(), torch.arange(7)
    bias_V, other_V, weights_3T = torch.randn(11).double(), torch.randn(11).double(), torch.randn(3, 7).double()

    def plain(hidden_TH: Tensor, head_VH: Tensor, bias_V: Tensor) -> list[Tensor]:
        def logprobs_TV(raw_TV: Tensor) -> Tensor:
            capped_TV = raw_TV if rule.cap is None else rule.cap * (raw_TV / rule.cap).tanh()
            return (capped_TV * rule.factor / 0.7).log_softmax(-1)

        own_TV = logprobs_TV(torch.nn.functional.linear(hidden_TH, head_VH, bias_V))
        of_reference_TV = logprobs_TV(torch.nn.functional.linear(reference_TH, other_VH, other_V))
        probs_TV = own_TV.exp()
        chosen_T = own_TV.gather(-1, targets_T[:, None])[:, 0]
        return [chosen_T, -(probs_TV * own_TV).sum(-1), (probs_TV * (own_TV - of_reference_TV)).sum(-1)]

    def ours(hidden_TH: Tensor, head_VH: Tensor, bias_V: Tensor | None) -> list[Tensor]:
        two = logprobs.selected_logprobs(hidden_TH, head_VH, targets_T, 0.7, keep_logits, None, rule, bias_V)
        reference = logprobs.Reference(reference_TH, other_VH, other_V)
        whole = logprobs.selected_logprobs_and_kl(hidden_TH, head_VH, targets_T, 0.7, reference, None, rule, bias_V)
        return [*two, whole[2]]

    def values_and_gradients(function: Callable[..., list[Tensor]]) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in (hidden_TH, head_VH, bias_V)]
        values = function(*leaves)
        (torch.stack(values) * weights_3T).sum().backward()
        return [*values, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found, expected = values_and_gradients(ours), values_and_gradients(plain)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    without = values_and_gradients(lambda hidden_TH, head_VH, _: ours(hidden_TH, head_VH, None))
    assert len(without) == 5 and not any(map(torch.allclose, without, expected))
