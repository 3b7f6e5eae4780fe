"""Correction of the rollout's policy: weights, rejection and figures against plain loops over padded rows in float64.

Invariants: masked tokens have no say, and any split of whole rows, in any order, gives the same weights and figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.algorithms.correction import Corrected, Correction, Measure, correct, mean_weight, mismatch_figures

COLUMNS = 9


@dataclass(frozen=True)
class Padded:
    """Rows in a rectangle: log-probs of the trainer and the rollout, and 1 where a token counts."""

    trainer: np.ndarray
    rollout: np.ndarray
    mask: np.ndarray
    lengths: list[int]

    @property
    def counted(self) -> list[list[tuple[float, float]]]:
        """Of each row, the log-probs of its counted tokens."""
        return [
            [(float(self.trainer[row, t]), float(self.rollout[row, t])) for t in range(length) if self.mask[row, t]]
            for row, length in enumerate(self.lengths)
        ]

    def packed(self, rows: list[int] | None = None) -> tuple[torch.Tensor, ...]:
        """Some rows as the functions take them: float32, flat, with NaN as the rollout's log-prob of masked tokens."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        cut = [[array[row, : self.lengths[row]] for row in rows] for array in (self.trainer, self.rollout, self.mask)]
        trainer_T, rollout_T, mask_T = (torch.from_numpy(np.concatenate(parts)).float() for parts in cut)
        offsets = np.concatenate([[0], np.cumsum([self.lengths[row] for row in rows])])
        return trainer_T, rollout_T.where(mask_T > 0, torch.nan), mask_T, torch.from_numpy(offsets)


def padded(spread: float = 0.4) -> Padded:
    """Eight rows: one without a token, one all masked, others with observations; float32 values, exact in float64."""
    random = np.random.default_rng(3)
    lengths = [5, 0, 9, 1, 7, 3, 8, 4]
    trainer = -random.exponential(1.2, (len(lengths), COLUMNS)).astype(np.float32)
    rollout = np.minimum(trainer + random.normal(scale=spread, size=trainer.shape), -1e-3).astype(np.float32)
    mask = random.random(trainer.shape) < 0.8
    mask[5] = False
    mask[3] = True
    return Padded(trainer.astype(np.float64), rollout.astype(np.float64), mask, lengths)


def weight_of(row: list[tuple[float, float]], t: int, correction: Correction) -> float:
    """The bounded weight of a counted token."""
    used = row if correction.weights == "sequence" else [row[t]]
    ratio = math.prod(math.exp(trainer) / math.exp(rollout) for trainer, rollout in used)
    if correction.cap is not None:
        return min(ratio, correction.cap)
    if correction.band is not None:
        return ratio if correction.band[0] <= ratio <= correction.band[1] else 0.0
    return ratio


def estimate(trainer: float, rollout: float, estimator: str) -> float:
    ratio = math.exp(trainer - rollout)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def is_kept(row: list[tuple[float, float]], t: int, reject: dict[str, float]) -> bool:
    for measure, bound in reject.items():
        level, estimator = measure[:-3], measure[-2:]
        values = [estimate(trainer, rollout, estimator) for trainer, rollout in row]
        size = {
            "token": abs(values[t]),
            "seq_sum": abs(sum(values)),
            "seq_mean": abs(sum(values) / len(values)),
            "seq_max": max(abs(value) for value in values),
        }[level]
        if size > bound:
            return False
    return True


def expected(batch: Padded, correction: Correction) -> tuple[list[float], list[bool]]:
    """Weights and decisions of all counted tokens, row after row."""
    weights, kept = [], []
    for row in batch.counted:
        for t in range(len(row)):
            weights.append(weight_of(row, t, correction))
            kept.append(is_kept(row, t, dict(correction.reject)))
    return weights, kept


def counted_only(values_T: torch.Tensor, mask_T: torch.Tensor) -> list[float]:
    return values_T[mask_T > 0].tolist()


def figures(corrected: list[Corrected], scale: float = 1.0) -> dict[str, float]:
    """Of the sums of several micro-batches."""
    sums = {name: sum(float(part.sums[name]) for part in corrected) / scale for name in corrected[0].sums}
    largest = max(float(part.largest_difference) for part in corrected)
    return mismatch_figures(sums) | {"probability_difference_max": largest}


WEIGHTS: list[dict[str, Any]] = [
    {"weights": "token", "cap": 1.3},
    {"weights": "token", "band": (0.7, 1.5)},
    {"weights": "sequence", "cap": 2.0},
    {"weights": "sequence", "band": (0.5, 3.0)},
]


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
def test_weights_are_the_bounded_ratios(settings: dict[str, Any]) -> None:
    """Some of them at the bound, and some not. Control: none is what the other level would give."""
    batch, correction = padded(), Correction(**settings)
    trainer_T, rollout_T, mask_T, offsets_B1 = batch.packed()
    corrected = correct(trainer_T, rollout_T, mask_T, offsets_B1, correction)
    weights, _ = expected(batch, correction)
    assert corrected.weights_T is not None
    assert counted_only(corrected.weights_T, mask_T) == pytest.approx(weights, rel=1e-6)
    bound = settings.get("cap", 0.0)
    assert 0 < weights.count(bound) < len(weights)
    other = Correction(**settings | {"weights": "token" if settings["weights"] == "sequence" else "sequence"})
    assert weights != pytest.approx(expected(batch, other)[0], rel=0.1)
    assert torch.isfinite(corrected.weights_T).all()


@pytest.mark.parametrize("measure", get_args(Measure))
def test_what_exceeds_a_bound_is_rejected(measure: Measure) -> None:
    """The bound is the median of what is measured: some tokens go, some stay, and no masked one counts in it."""
    batch = padded()
    level, estimator = measure[:-3], measure[-2:]
    sizes = []
    for row in batch.counted:
        values = [estimate(*pair, estimator) for pair in row] or [0.0]
        sequence = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(map(abs, values))}
        sizes += [abs(value) for value in values] if level == "token" else [abs(sequence[level])]
    reject: dict[Measure, float] = {measure: float(np.median(sizes)) * 1.001}
    correction = Correction(reject=reject)
    trainer_T, rollout_T, mask_T, offsets_B1 = batch.packed()
    kept = counted_only(correct(trainer_T, rollout_T, mask_T, offsets_B1, correction).kept_T, mask_T)
    assert kept == expected(batch, correction)[1]
    assert 0 < sum(kept) < len(kept)


def test_several_measures_all_have_to_agree() -> None:
    batch = padded()
    both = Correction(reject={"token_k1": 0.5, "seq_mean_k3": 0.08})
    trainer_T, rollout_T, mask_T, offsets_B1 = batch.packed()
    kept = counted_only(correct(trainer_T, rollout_T, mask_T, offsets_B1, both).kept_T, mask_T)
    assert kept == expected(batch, both)[1]
    for measure, bound in both.reject.items():
        assert kept != expected(batch, Correction(reject={measure: bound}))[1]


def test_figures_are_those_of_plain_loops() -> None:
    """Every figure, with weights at a cap and a rejection in force."""
    batch = padded()
    correction = Correction(weights="token", cap=1.3, reject={"seq_mean_k3": 0.08})
    weights, kept = expected(batch, correction)
    pairs = [pair for row in batch.counted for pair in row]
    p = np.array([math.exp(trainer) for trainer, _ in pairs])
    q = np.array([math.exp(rollout) for _, rollout in pairs])
    factor = np.array(weights) * np.array(kept)
    rows = [row for row in batch.counted if row]
    perplexities = [[math.exp(-sum(pair[side] for pair in row) / len(row)) for side in (0, 1)] for row in rows]
    gone = [not any(is_kept(row, t, dict(correction.reject)) for t in range(len(row))) for row in rows]
    found = figures([correct(*batch.packed(), correction)], scale=7.0)
    assert found == pytest.approx(
        {
            "kl_k1": np.log(q / p).mean(),
            "kl_k3": (p / q - 1 - np.log(p / q)).mean(),
            "chi2": ((p / q) ** 2).mean() - 1,
            "perplexity_ratio": np.mean([trainer / rollout for trainer, rollout in perplexities]),
            "probability_difference_mean": np.abs(p - q).mean(),
            "probability_difference_max": np.abs(p - q).max(),
            "probability_correlation": np.corrcoef(p, q)[0, 1],
            "weight_mean": factor.mean(),
            "effective_sample_share": factor.sum() ** 2 / (len(factor) * (factor**2).sum()),
            "truncated_share": np.mean(np.array(weights) == 1.3),
            "rejected_share": 1 - np.mean(kept),
            "rejected_sequences_share": np.mean(gone),
        },
        rel=1e-5,
    )
    assert 0 < found["rejected_sequences_share"] < 1
    band = figures([correct(*batch.packed(), Correction(weights="token", band=(0.7, 1.5)))])
    assert band["masked_share"] == pytest.approx(np.mean((p / q < 0.7) | (p / q > 1.5)))
    assert "truncated_share" not in band


def test_equal_policies_are_left_alone_and_figures_grow_with_the_mismatch() -> None:
    """Weights exactly 1, nothing rejected; every divergence rises with the distance of the two policies."""
    batch = padded()
    settings: dict[str, Any] = {"weights": "sequence", "cap": 2.0, "reject": {"seq_sum_k1": 1e-9}}
    trainer_T, _, mask_T, offsets_B1 = batch.packed()
    same = correct(trainer_T, trainer_T, mask_T, offsets_B1, Correction(**settings))
    assert same.weights_T is not None
    assert set(same.weights_T.tolist()) == set(same.kept_T.tolist()) == {1.0}
    clean = figures([same])
    assert clean["effective_sample_share"] == clean["perplexity_ratio"] == clean["weight_mean"] == 1.0
    assert clean["probability_correlation"] == pytest.approx(1.0)
    names = ("kl_k1", "kl_k3", "chi2", "probability_difference_mean", "probability_difference_max", "rejected_share")
    assert [clean[name] for name in names] == [0.0] * len(names)
    levels = [figures([correct(*padded(spread).packed(), Correction())]) for spread in (0.01, 0.1, 0.6)]
    for name in ("kl_k3", "chi2", "probability_difference_mean", "probability_difference_max"):
        assert levels[0][name] < levels[1][name] < levels[2][name], name
    for name in ("effective_sample_share", "probability_correlation"):
        assert levels[0][name] > levels[1][name] > levels[2][name], name


@pytest.mark.parametrize("settings", [{"weights": "token", "cap": 1.3}, {"weights": "sequence", "band": (0.5, 3.0)}])
def test_a_split_and_the_order_of_rows_change_nothing(settings: dict[str, Any]) -> None:
    """Weights of each row, and figures of all, from one batch or from three in another order."""
    batch = padded()
    correction = Correction(**settings, reject={"token_k1": 0.9, "seq_mean_k3": 0.2})
    whole = correct(*batch.packed(), correction)
    parts = {tuple(rows): correct(*batch.packed(rows), correction) for rows in ([6, 2], [7, 0, 1, 4], [5, 3])}
    assert figures(list(parts.values())) == pytest.approx(figures([whole]), rel=1e-12)
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    for rows, part in parts.items():
        ends = np.concatenate([[0], np.cumsum([batch.lengths[row] for row in rows])])
        for row, (start, end) in zip(rows, pairwise(ends), strict=True):
            assert part.weights_T is not None
            assert whole.weights_T is not None
            assert part.weights_T[start:end].tolist() == whole.weights_T[starts[row] : starts[row + 1]].tolist()
            assert part.kept_T[start:end].tolist() == whole.kept_T[starts[row] : starts[row + 1]].tolist()


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
def test_normalised_weights_have_mean_1_over_what_is_kept(settings: dict[str, Any]) -> None:
    """The mean comes from the whole mini-batch and divides in any part of it. Control: it is not 1 by itself."""
    batch, correction = padded(), Correction(**settings, normalize=True, reject={"token_k1": 0.6})
    trainer_T, rollout_T, mask_T, offsets_B1 = batch.packed()
    mean = mean_weight(trainer_T, rollout_T, mask_T, offsets_B1, correction)
    weights, kept = (np.array(values) for values in expected(batch, correction))
    assert mean == pytest.approx(weights[kept].mean(), rel=1e-6)
    assert abs(mean - 1) > 1e-3
    corrected = correct(trainer_T, rollout_T, mask_T, offsets_B1, correction, mean)
    assert corrected.weights_T is not None
    assert counted_only(corrected.weights_T, mask_T) == pytest.approx(weights / weights[kept].mean(), rel=1e-6)
    nothing_left = Correction(**settings, reject={"token_k1": 1e-12})
    assert mean_weight(trainer_T, rollout_T, mask_T, offsets_B1, nothing_left) == 1.0


def test_extreme_log_probs_stay_finite() -> None:
    """A token that one of the two all but excludes, in either direction, and in a sequence with others like it."""
    trainer_T, rollout_T = torch.tensor([-1e4, -0.1, -50.0, -60.0]), torch.tensor([-0.1, -1e4, -0.5, -0.5])
    for weights in ("token", "sequence"):
        correction = Correction(weights=weights, cap=2.0, reject={"seq_sum_k3": 1.0})
        corrected = correct(trainer_T, rollout_T, torch.ones(4), torch.tensor([0, 1, 4]), correction)
        assert corrected.weights_T is not None
        assert torch.isfinite(corrected.weights_T).all()
        assert corrected.weights_T.max() <= 2.0
        assert all(math.isfinite(value) for value in figures([corrected]).values())


def test_weights_and_decisions_carry_no_gradient_of_the_log_probs() -> None:
    """They are computed from detached log-probs, and multiply a loss as constants."""
    batch = padded()
    trainer_T, rollout_T, mask_T, offsets_B1 = batch.packed()
    trainer_T.requires_grad_()
    corrected = correct(trainer_T.detach(), rollout_T, mask_T, offsets_B1, Correction(weights="token", cap=2.0))
    assert corrected.weights_T is not None
    (corrected.weights_T * trainer_T * mask_T).sum().backward()
    torch.testing.assert_close(trainer_T.grad, corrected.weights_T * mask_T)
