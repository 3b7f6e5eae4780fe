"""Every policy loss with every aggregation: value and gradient are the paper's, however the mini-batch is cut.

The papers' side is `tests.algorithms.losses`, loops over plain numbers with gradients by finite differences.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.aggregation import AGGREGATIONS, aggregate
from penstock.algorithms.covariance import token_covariances
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES, clip_cov, kl_cov
from penstock.algorithms.policy_losses.types import PolicyLossInputs
from tests.algorithms import losses as papers
from tests.algorithms.losses import Sequence, denominators, differences, objective, packed

CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}),
    ("reinforce", {}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gmpo", {}),
    ("gmpo", {"log_clip_low": 0.1, "log_clip_high": 0.6}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("sapo", {}),
    ("sapo", {"gate_positive": 3.0, "gate_negative": 0.5}),
    ("clip_cov", {}),
    ("kl_cov", {}),
    ("kl_cov", {"covariance_pull": 0.3}),
    ("dppo", {}),
    ("dppo", {"divergence": "kl", "divergence_bound": 0.05, "weight_bound": 1.2}),
]
STOPS_GRADIENTS = {"gspo", "gmpo", "cispo", "clip_cov", "dppo"}


def mini_batch(seed: int = 0) -> list[Sequence]:
    """Rows of 0 to 7 tokens: an empty, a fully masked and a one-token row; masked tokens hold values far off.

    All tokens of a row have one advantage, for which GSPO and GMPO are defined.
    """
    draw = random.Random(seed)
    rows = []
    for length in (3, 0, 1, 7, 4, 2, 5, 6):
        mask = [int(draw.random() < 0.75) for _ in range(length)]
        mask = [0, 0] if length == 2 else [1] if length == 1 else [1, *mask[1:]] if length else []
        old = [-draw.expovariate(1.0) - 0.7 for _ in range(length)]
        now = [min(before + draw.gauss(0, 0.4), -0.01) for before in old]
        now = [value if kept else -25.0 for value, kept in zip(now, mask, strict=True)]
        chosen = [kept * int(draw.random() < 0.3) for kept in mask]
        rows.append(Sequence(now, old, [draw.gauss(0, 1.5)] * length, mask, chosen))
    return rows


def loss_and_gradient(
    rows: list[Sequence], name: str, settings: dict[str, Any], mode: str
) -> tuple[float, list[float]]:
    inputs = packed(rows)
    loss_T = POLICY_LOSSES[name](inputs, **settings).loss_T
    loss = aggregate(loss_T, inputs.mask_T, inputs.offsets_B1, mode, denominators(rows))
    loss.backward()
    return loss.item(), inputs.logprobs_T.grad.tolist()


def gradient_at(inputs: PolicyLossInputs, name: str, settings: dict[str, Any]) -> list[float]:
    (gradient_T,) = torch.autograd.grad(POLICY_LOSSES[name](inputs, **settings).loss_T.sum(), inputs.logprobs_T)
    found: list[float] = gradient_T.tolist()
    return found


@pytest.mark.parametrize(("name", "settings"), [case for case in CASES if case[1]])
def test_where_every_ratio_is_one_no_setting_changes_the_gradient(name: str, settings: dict[str, Any]) -> None:
    """Hence a recipe of one step per iteration that sets one is refused. Control: off the policy it changes."""
    off = packed(mini_batch())
    on = dataclasses.replace(off, old_logprobs_T=off.logprobs_T.detach())
    assert gradient_at(on, name, settings) == gradient_at(on, name, {})
    assert gradient_at(off, name, settings) != gradient_at(off, name, {})


# ---- equal to the papers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_value_and_gradient_are_the_papers(name: str, settings: dict[str, Any], mode: str) -> None:
    rows, paper = mini_batch(), getattr(papers, name)
    value, gradient = loss_and_gradient(rows, name, settings, mode)
    assert value == pytest.approx(objective(paper, rows, [row.logprobs for row in rows], mode, settings), abs=1e-9)
    np.testing.assert_allclose(gradient, differences(paper, rows, mode, settings), rtol=0, atol=1e-6)
    assert max(map(abs, gradient)) > 1e-3


def test_every_loss_is_compared_and_the_rows_reach_its_branches() -> None:
    """The comparison is not vacuous: each clip, gate and mask decides on some tokens and not on others."""
    assert {name for name, _ in CASES} == set(POLICY_LOSSES)
    rows = mini_batch()
    counted_T = packed(rows).mask_T > 0
    for name, settings in CASES:
        metrics_T = POLICY_LOSSES[name](packed(rows), **settings).metrics_T
        for metric in {"clip_fraction", "chosen"} & set(metrics_T):
            # Bounds of one in three thousand leave no sequence inside, and 5 as a weight is out of reach here.
            if (name, settings) not in [("gspo", {}), ("cispo", {})]:
                assert 0 < metrics_T[metric][counted_T].mean() < 1, (name, settings, metric)


@pytest.mark.parametrize(("name", "settings"), [case for case in CASES if case[0] not in STOPS_GRADIENTS], ids=str)
def test_gradcheck(name: str, settings: dict[str, Any]) -> None:
    """Where no gradient is stopped, autograd agrees with differences of the code itself."""
    inputs = packed([row for row in mini_batch() if any(row.mask)])

    def loss(logprobs_T: torch.Tensor) -> torch.Tensor:
        moved = dataclasses.replace(inputs, logprobs_T=logprobs_T)
        return POLICY_LOSSES[name](moved, **settings).loss_T * inputs.mask_T

    assert torch.autograd.gradcheck(loss, (inputs.logprobs_T,))


def test_the_token_form_of_gspo_moves_each_token_by_its_own_advantage() -> None:
    """Advantages 1 and 3 in one sequence: GSPO-token, equation 14. The sequence form would give both the mean."""
    row = Sequence([-1.0, -2.0], [-1.1, -1.9], [1.0, 3.0], [1, 1], [0, 0])
    _, gradient = loss_and_gradient([row], "gspo", {"clip_low": 0.5, "clip_high": 0.5}, "token-sum")
    np.testing.assert_allclose(gradient, [-1.0, -3.0], atol=1e-12)
    np.testing.assert_allclose(differences(papers.gspo, [row], "token-sum", {"clip_low": 0.5}), [-2.0, -2.0], atol=1e-6)


# ---- however it is cut -----------------------------------------------------------------------------------------------

SPLITS = [[0, 1, 8], [0, 2, 3, 5, 8], list(range(9)), [0, 4, 4, 8]]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_neither_the_split_nor_the_order_of_rows_changes_anything(name: str, mode: str) -> None:
    """Micro-batches with one row, no token and no row; ranks only sum, so they are micro-batches too."""
    rows = mini_batch()
    counts = denominators(rows)
    value, gradient = loss_and_gradient(rows, name, {}, mode)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    starts = np.concatenate(([0], np.cumsum([len(row.mask) for row in rows])))
    for chosen, boundaries in [(list(range(8)), split) for split in SPLITS] + [(order, [0, 8]), (order, [0, 3, 8])]:
        shares, gradients = [], {}
        for first, last in itertools.pairwise(boundaries):
            inputs = packed([rows[index] for index in chosen[first:last]])
            loss_T = POLICY_LOSSES[name](inputs).loss_T
            share = aggregate(loss_T, inputs.mask_T, inputs.offsets_B1, mode, counts)
            share.backward()
            shares.append(share.item())
            parts = inputs.logprobs_T.grad.split(inputs.offsets_B1.diff().tolist())
            gradients |= dict(zip(chosen[first:last], parts, strict=True))
        assert sum(shares) == pytest.approx(value, abs=1e-12)
        for index in range(len(rows)):
            expected = gradient[starts[index] : starts[index + 1]]
            np.testing.assert_allclose(gradients[index].tolist(), expected, rtol=0, atol=1e-12)


def test_control_a_mean_within_the_micro_batch_depends_on_the_split() -> None:
    """Negative control: GMPO averaged over the rows of each micro-batch, then over micro-batches, is another loss."""
    rows = [row for row in mini_batch() if any(row.mask)]
    whole, _ = loss_and_gradient(rows, "gmpo", {}, "seq-mean-token-mean")
    parts = [loss_and_gradient(part, "gmpo", {}, "seq-mean-token-mean")[0] for part in (rows[:1], rows[1:])]
    assert abs(sum(parts) / 2 - whole) > 1e-2


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_is_masked_is_not_read(name: str) -> None:
    inputs = packed(mini_batch())
    far_T = torch.where(inputs.mask_T > 0, inputs.logprobs_T.detach(), -3.0).requires_grad_()
    results = []
    for logprobs_T in (inputs.logprobs_T, far_T):
        outputs = POLICY_LOSSES[name](dataclasses.replace(inputs, logprobs_T=logprobs_T))
        (outputs.loss_T * inputs.mask_T).sum().backward()
        assert outputs.loss_T.isfinite().all()
        assert (logprobs_T.grad[inputs.mask_T == 0] == 0).all()
        results.append(logprobs_T.grad)
    assert torch.equal(*results)


# ---- on-policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_reinforce(
    name: str, dtype: torch.dtype, mode: str
) -> None:
    """Ratio exactly 1, nothing clipped, divergence exactly 0; Clip-Cov's chosen tokens alone stand still.

    The gradient is exactly that of REINFORCE but for SAPO's gate, which rounds.
    """
    rows = mini_batch()
    inputs = packed(rows, dtype=dtype)
    now_T = (inputs.logprobs_T.detach() / 2).requires_grad_()
    inputs = dataclasses.replace(inputs, logprobs_T=now_T, old_logprobs_T=now_T.detach())
    outputs = POLICY_LOSSES[name](inputs)
    for metric, expected in {"ratio": 1, "approx_kl": 0, "clip_fraction": 0}.items():
        assert (outputs.metrics_T.get(metric, torch.tensor(expected)) == expected).all()

    counts = denominators(rows)
    aggregate(outputs.loss_T, inputs.mask_T, inputs.offsets_B1, mode, counts).backward()
    plain_T = now_T.detach().clone().requires_grad_()
    aggregate(-inputs.advantages_T * plain_T, inputs.mask_T, inputs.offsets_B1, mode, counts).backward()
    expected_T = plain_T.grad * (1 - inputs.chosen_T) if name == "clip_cov" else plain_T.grad
    tolerance = 1e-6 if name == "sapo" else 0
    torch.testing.assert_close(now_T.grad, expected_T, rtol=tolerance, atol=tolerance / 10)
    assert now_T.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_control_off_policy_the_ratio_is_not_one(name: str) -> None:
    ratio_T = POLICY_LOSSES[name](packed(mini_batch())).metrics_T["ratio"]
    assert (ratio_T - 1).abs().max() > 1e-2


# ---- far away --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    """float32, log-ratios of +-200, both signs of the advantage. Negative control: the plain ratio overflows."""
    rows = [Sequence([0.0], [-200.0], [a], [1], [1]) for a in (1.0, -1.0)]
    rows += [Sequence([-200.0], [0.0], [a], [1], [1]) for a in (1.0, -1.0)]
    inputs = packed(rows, dtype=torch.float32)
    outputs = POLICY_LOSSES[name](inputs)
    outputs.loss_T.sum().backward()
    assert outputs.loss_T.isfinite().all()
    assert inputs.logprobs_T.grad.isfinite().all()
    assert all(metric_T.isfinite().all() for metric_T in outputs.metrics_T.values())
    assert (inputs.logprobs_T - inputs.old_logprobs_T).exp().isinf().any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_micro_batch(name: str) -> None:
    assert POLICY_LOSSES[name](packed([])).loss_T.shape == (0,)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_are_detached_and_per_token(name: str) -> None:
    inputs: PolicyLossInputs = packed(mini_batch())
    for metric_T in POLICY_LOSSES[name](inputs).metrics_T.values():
        assert not metric_T.requires_grad
        assert metric_T.shape == inputs.mask_T.shape


# ---- tokens chosen over the mini-batch -------------------------------------------------------------------------------


def drawn(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=tokens).astype(np.float32), -generator.exponential(2, size=tokens).astype(np.float32)


def test_covariances_by_hand() -> None:
    """A 1, 2, 6: from the mean -2, -1, 3. log p -1, -4, -1: from the mean 1, -2, 1."""
    covariances = token_covariances(np.array([1.0, 2.0, 6.0]), np.array([-1.0, -4.0, -1.0]))
    np.testing.assert_allclose(covariances, [-2, 2, 3], atol=1e-15)


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.5, 1.0])
def test_kl_cov_chooses_the_largest(share: float) -> None:
    """As many as the share says, at least one; no token left out has a larger covariance."""
    covariances, chosen = token_covariances(*drawn(1000)), kl_cov.choose(*drawn(1000), covariance_share=share)
    assert chosen.sum() == max(1, int(share * 1000))
    assert covariances[chosen].min() >= covariances[~chosen].max(initial=-np.inf)


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.05, 1.0])
def test_clip_cov_chooses_evenly_within_the_bounds(share: float) -> None:
    """As many as the share says, of those inside; their mean covariance is that of all inside, as of a fair draw."""
    covariances = token_covariances(*drawn(4000))
    inside = (covariances > 0.5) & (covariances < 2.0)
    chosen = clip_cov.choose(*drawn(4000), covariance_share=share, covariance_low=0.5, covariance_high=2.0)
    assert not chosen[~inside].any()
    assert chosen.sum() == min(inside.sum(), max(1, int(share * 4000)))
    if share >= 0.01:
        assert covariances[chosen].mean() == pytest.approx(covariances[inside].mean(), rel=0.01)


def test_clip_cov_chooses_nothing_where_nothing_is_within_the_bounds() -> None:
    assert not clip_cov.choose(*drawn(100), covariance_low=100.0, covariance_high=200.0).any()


@pytest.mark.parametrize("name", CHOICES)
def test_the_order_of_tokens_changes_no_choice(name: str) -> None:
    """Hence neither ranks nor rows do. Control: another mini-batch is another choice."""
    advantages, logprobs = drawn(500)
    settings = {"covariance_share": 0.05} | ({"covariance_low": 0.3} if name == "clip_cov" else {})
    chosen = CHOICES[name](advantages, logprobs, **settings)
    order = np.random.default_rng(1).permutation(500)
    np.testing.assert_array_equal(CHOICES[name](advantages[order], logprobs[order], **settings), chosen[order])
    assert not np.array_equal(CHOICES[name](*drawn(500, seed=2), **settings), chosen)


@pytest.mark.parametrize("name", CHOICES)
def test_a_loss_that_chooses_requires_the_choice(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs tokens chosen"):
        POLICY_LOSSES[name](dataclasses.replace(packed(mini_batch()), chosen_T=None))
