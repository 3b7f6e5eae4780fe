"""Correction for a rollout engine whose policy is not quite the trainer's: weights, rejection, and how far they part.

The rollout engine samples the tokens, and losses assume that the trainer did. Both compute the same weights with other
kernels, so their log-probs differ by rounding, and on some tokens by a lot; experience of an older policy adds to that.
Importance weights pi / pi_rollout put it right in expectation; they are bounded, since a few would drown the rest. pi
is the proximal policy, from which the update starts: the one that clips compare with.

Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training" (capped weights, TIS);
Ling team 2025, "Every step evolves" (arXiv 2510.18855), IcePop (weights 0 outside a band); Hilton et al. 2021 (arXiv
2110.00641), for the weight beside the ratio; Schulman 2020 for the estimators k1, k2 and k3.

Left out: the log-probs themselves, and what the weights multiply (penstock/engines/training/updates.py). Everything
here sees whole rows of any part of a mini-batch; what has to be known of all of it comes in as `weight_mean`.

Shapes: _T flat response tokens of a packed batch, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.algorithms.kl import LOG_RATIO_BOUND, kl_estimate
from penstock.algorithms.segments import rows_of_tokens, segment_max_torch, segment_sum_torch

if TYPE_CHECKING:
    from torch import Tensor

# <of what>_<estimator>, of the divergence of the rollout's policy from the proximal one: of a token, of a sequence's
# tokens their mean, sum or largest.
Measure = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]


@dataclass(frozen=True)
class Correction:
    """What is corrected.

    Args:
        proximal: ``recomputed``, the trainer's log-probs; ``rollout``, the rollout's own, so that the loss's ratio
            corrects and there is no weight; its divergence is then measured from the current policy.
        weights: one per ``token``, or one per ``sequence``, the product over its counted tokens; None for none.
        cap: larger weights are cut to it.
        band: weights outside become 0; instead of a cap.
        normalize: divide weights by their mean over the mini-batch's tokens that no measure rejects.
        reject: the largest size of each measure; what exceeds one is in no term of the loss.
    """

    proximal: Literal["recomputed", "rollout"] = "recomputed"
    weights: Literal["token", "sequence"] | None = None
    cap: float | None = None
    band: tuple[float, float] | None = None
    normalize: bool | None = None
    reject: dict[Measure, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Corrected:
    """A batch's correction, without gradient.

    Args:
        weights_T: factor of the policy loss; None for 1.
        kept_T: 1.0, or 0.0 where a measure rejects the token or its sequence.
        sums: figures that add up over micro-batches and ranks, each a scalar; ``mismatch_figures`` reads them.
        largest_difference: of the two probabilities of a counted token; a scalar.
    """

    weights_T: Tensor | None
    kept_T: Tensor
    sums: dict[str, Tensor]
    largest_difference: Tensor


def correct(
    proximal_T: Tensor,
    rollout_T: Tensor,
    mask_T: Tensor,
    offsets_B1: Tensor,
    correction: Correction,
    weight_mean: Tensor | float = 1.0,
) -> Corrected:
    """Weigh and reject the tokens of whole rows, and sum up how far rollout and trainer are apart.

    Args:
        proximal_T: log-probs under the proximal policy, without gradient.
        rollout_T: log-probs under the distribution that the tokens were sampled from; any value where the mask is 0.
        mask_T: 1.0 where a token counts.
        offsets_B1: where rows begin and end.
        correction: what is wanted.
        weight_mean: what ``mean_weight`` gave for the whole mini-batch, if weights are normalised.
    """
    log_ratio_T = _log_ratio(proximal_T, rollout_T, mask_T)
    kept_T = _kept(log_ratio_T, mask_T, offsets_B1, correction.reject)
    ratio_T = _ratio(log_ratio_T, offsets_B1, correction.weights)
    weights_T = _bounded(ratio_T, correction)
    sums = _divergence_sums(proximal_T, log_ratio_T, mask_T, offsets_B1)
    sums |= _weight_sums(ratio_T, weights_T, kept_T, mask_T, correction)
    sums |= _rejection_sums(kept_T, mask_T, offsets_B1)
    difference_T = _difference(proximal_T, log_ratio_T, mask_T)
    return Corrected(
        weights_T=None if correction.weights is None else (weights_T / weight_mean).to(proximal_T.dtype),
        kept_T=kept_T.to(proximal_T.dtype),
        sums=sums,
        largest_difference=difference_T.max() if difference_T.numel() else difference_T.sum(),
    )


def mean_weight(
    proximal_T: Tensor, rollout_T: Tensor, mask_T: Tensor, offsets_B1: Tensor, correction: Correction
) -> float:
    """Mean of the bounded weights over the counted tokens of a mini-batch that no measure rejects; 1 if all are 0."""
    log_ratio_T = _log_ratio(proximal_T, rollout_T, mask_T)
    counted_T = _kept(log_ratio_T, mask_T, offsets_B1, correction.reject) * mask_T
    weights_T = _bounded(_ratio(log_ratio_T, offsets_B1, correction.weights), correction)
    total, tokens = float((weights_T * counted_T).sum()), float(counted_T.sum())
    return total / tokens if total else 1.0


# ---- weights and rejection -----------------------------------------------------------------------------------------


def _log_ratio(proximal_T: Tensor, rollout_T: Tensor, mask_T: Tensor) -> Tensor:
    """log pi - log pi_rollout in float64, bounded; 0 where the token does not count."""
    log_ratio_T = (proximal_T.double() - rollout_T.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio_T.where(mask_T > 0, 0.0)


def _ratio(log_ratio_T: Tensor, offsets_B1: Tensor, weights: str | None) -> Tensor:
    if weights == "sequence":
        log_ratio_T = _spread(segment_sum_torch(log_ratio_T, offsets_B1), offsets_B1, log_ratio_T.shape[0])
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _bounded(ratio_T: Tensor, correction: Correction) -> Tensor:
    if correction.cap is not None:
        return ratio_T.clamp(max=correction.cap)
    if correction.band is not None:
        low, high = correction.band
        return ratio_T * ((ratio_T >= low) & (ratio_T <= high))
    return ratio_T


def _kept(log_ratio_T: Tensor, mask_T: Tensor, offsets_B1: Tensor, reject: Mapping[Measure, float]) -> Tensor:
    import torch

    kept_T = torch.ones_like(log_ratio_T)
    for measure, bound in reject.items():
        kept_T = kept_T * (size_of(measure, log_ratio_T, mask_T, offsets_B1) <= bound)
    return kept_T


def size_of(measure: Measure, log_ratio_T: Tensor, mask_T: Tensor, offsets_B1: Tensor) -> Tensor:
    """Absolute value of a measure, at each token of what it measures; _T.

    Args:
        measure: which one.
        log_ratio_T: log pi - log pi_rollout, 0 where a token does not count.
        mask_T: 1.0 where it counts.
        offsets_B1: where rows begin and end.
    """
    level, estimator = measure.rsplit("_", 1)
    value_T = kl_estimate(log_ratio_T.new_zeros(()).expand_as(log_ratio_T), log_ratio_T, estimator)
    if level == "token":
        return value_T.abs()
    if level == "seq_max":
        value_B = segment_max_torch(value_T.abs(), offsets_B1)
    else:
        value_B = segment_sum_torch(value_T, offsets_B1).abs()
    if level == "seq_mean":
        value_B = value_B / segment_sum_torch(mask_T, offsets_B1).clamp(min=1)
    return _spread(value_B, offsets_B1, value_T.shape[0])


def _spread(value_B: Tensor, offsets_B1: Tensor, tokens: int) -> Tensor:
    return value_B.index_select(0, rows_of_tokens(offsets_B1, tokens))


# ---- figures -------------------------------------------------------------------------------------------------------


def _probabilities(proximal_T: Tensor, log_ratio_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Of the proximal policy and the rollout's, float64; both 0 where the token does not count."""
    log_proximal_T = proximal_T.double()
    counted_T = mask_T > 0
    return (
        log_proximal_T.exp().where(counted_T, 0.0),
        (log_proximal_T - log_ratio_T).exp().where(counted_T, 0.0),
    )


def _difference(proximal_T: Tensor, log_ratio_T: Tensor, mask_T: Tensor) -> Tensor:
    trainer_T, rollout_T = _probabilities(proximal_T, log_ratio_T, mask_T)
    return (trainer_T - rollout_T).abs()


def _divergence_sums(proximal_T: Tensor, log_ratio_T: Tensor, mask_T: Tensor, offsets_B1: Tensor) -> dict[str, Tensor]:
    trainer_T, rollout_T = _probabilities(proximal_T, log_ratio_T, mask_T)
    tokens_B = segment_sum_torch(mask_T, offsets_B1)
    surprise_B = -segment_sum_torch(log_ratio_T, offsets_B1) / tokens_B.clamp(min=1)
    return {
        "tokens": mask_T.double().sum(),
        "sequences": (tokens_B > 0).double().sum(),
        "k1": -log_ratio_T.sum(),
        "k3": (log_ratio_T.expm1() - log_ratio_T).sum(),
        "squared_ratio": ((2 * log_ratio_T).exp() * mask_T).sum(),
        "perplexity_ratio": (surprise_B.exp() * (tokens_B > 0)).sum(),
        "difference": (trainer_T - rollout_T).abs().sum(),
        "trainer": trainer_T.sum(),
        "rollout": rollout_T.sum(),
        "trainer_trainer": (trainer_T * trainer_T).sum(),
        "rollout_rollout": (rollout_T * rollout_T).sum(),
        "trainer_rollout": (trainer_T * rollout_T).sum(),
    }


def _weight_sums(
    ratio_T: Tensor, weights_T: Tensor, kept_T: Tensor, mask_T: Tensor, correction: Correction
) -> dict[str, Tensor]:
    factor_T = weights_T * kept_T * mask_T
    sums = {"weight": factor_T.sum(), "squared_weight": (factor_T * factor_T).sum()}
    changed = ((weights_T != ratio_T) * mask_T).sum()
    if correction.cap is not None:
        return sums | {"truncated": changed}
    return sums | {"masked": changed} if correction.band is not None else sums


def _rejection_sums(kept_T: Tensor, mask_T: Tensor, offsets_B1: Tensor) -> dict[str, Tensor]:
    counted_B, left_B = (segment_sum_torch(x_T, offsets_B1) for x_T in (mask_T, kept_T * mask_T))
    return {
        "rejected": ((1 - kept_T) * mask_T).sum(),
        "rejected_sequences": ((counted_B > 0) & (left_B == 0)).double().sum(),
    }


def mismatch_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """What is recorded, from the sums over all tokens, or from those divided by any one number.

    ``kl_k1``, ``kl_k3``: estimates of KL(rollout, trainer), nats per token. ``probability_difference_mean``: of
    |p - p_rollout| over tokens; ``probability_correlation``: Pearson's, of the two. ``perplexity_ratio``: mean over
    sequences of the trainer's perplexity over the rollout's. ``chi2``: E[(p / p_rollout)^2] - 1 over tokens.
    ``effective_sample_share``: (sum of w)^2 / (tokens sum of w^2) of the weights in force, of plain token ratios
    where there are none; a rejected token weighs 0. ``weight_mean`` is theirs before a normalisation.
    Shares of tokens: ``truncated_share`` at the cap, ``masked_share`` outside the band, ``rejected_share``; of
    sequences of which no token is left: ``rejected_sequences_share``.
    """
    tokens, sequences = sums["tokens"], sums["sequences"]
    shares = {f"{name}_share": sums[name] / tokens for name in ("truncated", "masked", "rejected") if name in sums}
    return shares | {
        "kl_k1": sums["k1"] / tokens,
        "kl_k3": sums["k3"] / tokens,
        "chi2": sums["squared_ratio"] / tokens - 1,
        "perplexity_ratio": sums["perplexity_ratio"] / sequences,
        "probability_difference_mean": sums["difference"] / tokens,
        "probability_correlation": _correlation({name: value / tokens for name, value in sums.items()}),
        "weight_mean": sums["weight"] / tokens,
        "effective_sample_share": sums["weight"] ** 2 / (tokens * sums["squared_weight"])
        if sums["squared_weight"]
        else 0.0,
        "rejected_sequences_share": sums["rejected_sequences"] / sequences,
    }


def _correlation(means: Mapping[str, float]) -> float:
    """Pearson's coefficient; NaN where one of the two does not vary."""
    trainer, rollout = means["trainer"], means["rollout"]
    variances = (means["trainer_trainer"] - trainer**2) * (means["rollout_rollout"] - rollout**2)
    return (means["trainer_rollout"] - trainer * rollout) / math.sqrt(variances) if variances > 0 else math.nan
