"""Preference losses against the papers' formulas written out again in plain Python, and their gradients.

Invariant: a loss is a function of log-probs of whole responses, the same wherever rows lie in the packed array.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from penstock.algorithms.bradley_terry import bradley_terry
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.preference.orpo import log_odds
from penstock.algorithms.preference.types import LabelInputs, PairInputs
from penstock.algorithms.registry import is_labelled, needs_reference

NOW = [[-0.5, -1.25], [-2.0], [-0.1, -0.7, -0.3], [-1.5, -0.2]]
REFERENCE = [[-0.9, -1.0], [-1.0], [-0.2, -0.9, -0.1], [-1.0, -0.6]]
PAIRS = [(0, 1), (3, 2)]  # chosen, rejected: not in the order of the rows
LABELS = [1, 0, 0, 1]
KL = 0.05


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def offsets(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([0, *(sum(map(len, rows[: row + 1])) for row in range(len(rows)))])


def pair_inputs(logprobs_T: torch.Tensor, reference: bool = True) -> PairInputs:
    chosen, rejected = (torch.tensor(side) for side in zip(*PAIRS, strict=True))
    return PairInputs(logprobs_T, flat(REFERENCE) if reference else None, offsets(NOW), chosen, rejected)


def label_inputs(logprobs_T: torch.Tensor, labels: list[int] = LABELS) -> LabelInputs:
    good, kl = torch.tensor(labels, dtype=torch.float64), torch.tensor(KL, dtype=torch.float64)
    return LabelInputs(logprobs_T, flat(REFERENCE), offsets(NOW), good, kl)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ratio(row: int) -> float:
    return sum(NOW[row]) - sum(REFERENCE[row])


def golden_dpo(chosen: int, rejected: int, beta: float = 0.1, label_smoothing: float = 0.0) -> float:
    margin = beta * (ratio(chosen) - ratio(rejected))
    return -(1 - label_smoothing) * math.log(sigmoid(margin)) - label_smoothing * math.log(1 - sigmoid(margin))


def golden_ipo(chosen: int, rejected: int, beta: float = 0.1) -> float:
    return (ratio(chosen) - ratio(rejected) - 0.5 / beta) ** 2


def golden_orpo(chosen: int, rejected: int, odds_weight: float = 0.1) -> float:
    p = {row: math.exp(sum(NOW[row]) / len(NOW[row])) for row in (chosen, rejected)}
    odds = {row: value / (1 - value) for row, value in p.items()}
    return -math.log(p[chosen]) - odds_weight * math.log(sigmoid(math.log(odds[chosen] / odds[rejected])))


def golden_kto(row: int, good: int, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> float:
    if good:
        return desirable - desirable * sigmoid(beta * (ratio(row) - KL))
    return undesirable - undesirable * sigmoid(beta * (KL - ratio(row)))


@pytest.mark.parametrize(
    ("name", "golden", "settings"),
    [
        ("dpo", golden_dpo, {}),
        ("dpo", golden_dpo, {"beta": 0.7, "label_smoothing": 0.2}),
        ("ipo", golden_ipo, {"beta": 0.4}),
        ("orpo", golden_orpo, {"odds_weight": 0.3}),
    ],
)
def test_pair_losses_are_the_papers(name: str, golden: Callable[..., float], settings: dict[str, float]) -> None:
    outputs = PREFERENCE_LOSSES[name](pair_inputs(flat(NOW), needs_reference(name)), **settings)
    expected = [golden(*pair, **settings) for pair in PAIRS]
    torch.testing.assert_close(outputs.loss_U, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    swapped = [golden(*reversed(pair), **settings) for pair in PAIRS]
    assert not torch.allclose(outputs.loss_U, torch.tensor(swapped, dtype=torch.float64))


def test_kto_is_the_papers() -> None:
    settings = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    outputs = PREFERENCE_LOSSES["kto"](label_inputs(flat(NOW)), **settings)
    expected = [golden_kto(row, good, 0.5, 1.5, 0.7) for row, good in enumerate(LABELS)]
    torch.testing.assert_close(outputs.loss_U, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    signs = [(1 if good else -1) * (ratio(row) - KL) > 0 for row, good in enumerate(LABELS)]
    assert (outputs.margin_U > 0).tolist() == signs


@pytest.mark.parametrize("label", [0, 1])
def test_kto_takes_labels_of_one_side_alone(label: int) -> None:
    """Only good or only bad responses: every row has its own loss and a gradient that goes the label's way."""
    logprobs_T = flat(NOW).requires_grad_()
    PREFERENCE_LOSSES["kto"](label_inputs(logprobs_T, [label] * 4)).loss_U.sum().backward()
    assert logprobs_T.grad is not None
    assert ((logprobs_T.grad < 0) == bool(label)).all()


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_gradients_are_those_of_the_loss(name: str) -> None:
    def loss(logprobs_T: torch.Tensor) -> torch.Tensor:
        inputs = label_inputs(logprobs_T) if is_labelled(name) else pair_inputs(logprobs_T, needs_reference(name))
        result: torch.Tensor = PREFERENCE_LOSSES[name](inputs).loss_U
        return result

    assert torch.autograd.gradcheck(loss, flat(NOW).requires_grad_())


def test_a_policy_equal_to_its_reference_has_the_loss_of_no_knowledge() -> None:
    """log 2 and margin 0 for DPO at the first step, whatever beta and smoothing."""
    outputs = PREFERENCE_LOSSES["dpo"](pair_inputs(flat(REFERENCE)), beta=3.0, label_smoothing=0.3)
    assert outputs.loss_U.tolist() == pytest.approx([math.log(2)] * 2)
    assert outputs.margin_U.tolist() == [0.0, 0.0]


def test_what_dpo_gives_one_of_two_equal_responses_it_takes_from_the_other() -> None:
    rows = torch.tensor([0, 1])
    logprobs_T = torch.tensor([-1.0, -2.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = PairInputs(logprobs_T, torch.zeros(4, dtype=torch.float64), torch.tensor([0, 2, 4]), rows[:1], rows[1:])
    loss_U = PREFERENCE_LOSSES["dpo"](inputs).loss_U
    assert loss_U.item() == pytest.approx(math.log(2))
    loss_U.sum().backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad[:2].tolist() == (-logprobs_T.grad[2:]).tolist()  # what one gains the other loses


def test_a_loss_with_reference_refuses_to_go_without() -> None:
    assert not needs_reference("orpo")
    for name in ("dpo", "ipo"):
        with pytest.raises(ValueError, match="log-probs are missing"):
            PREFERENCE_LOSSES[name](pair_inputs(flat(NOW), reference=False))


def test_log_odds_keep_their_digits_at_both_ends() -> None:
    """In float32, against double precision; a certain response has finite odds and gradients."""
    logprobs = torch.tensor([-30.0, -0.7, -1e-3, -1e-5, 0.0], requires_grad=True)
    odds = log_odds(logprobs)
    exact = [value - math.log(-math.expm1(value)) for value in logprobs.tolist()[:4]]
    assert odds.tolist()[:4] == pytest.approx(exact, rel=1e-5)
    odds.sum().backward()
    assert torch.isfinite(odds).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_bradley_terry_by_hand() -> None:
    """A margin asks for more; without one and with equal scores it is log 2. Extreme scores stay finite."""
    chosen, rejected = torch.tensor([1.0, 2.0, -500.0]), torch.tensor([1.0, 0.5, 500.0])
    loss = bradley_terry(chosen, rejected, torch.tensor([0.0, 0.5, 0.0]))
    assert loss.tolist() == pytest.approx([math.log(2), -math.log(sigmoid(1.0)), 1000.0])
    double = [value.double().requires_grad_() for value in (chosen[:2], rejected[:2])]
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry(a, b, torch.zeros(2).double()), double)
