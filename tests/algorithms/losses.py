"""Every policy loss and aggregation written out from the papers: plain Python over rows of numbers, nothing shared.

A loss is a function of the log-probabilities. What a paper holds constant in it (a stopped gradient) is computed from
`still`, a second copy of them, so that the gradient is what finite differences in the first copy alone say it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.algorithms.aggregation import Denominators
from penstock.algorithms.policy_losses.types import PolicyLossInputs

MAX_TOKENS = 7


@dataclass(frozen=True)
class Sequence:
    """One row; all lists of one length, observations among them."""

    logprobs: list[float]
    old: list[float]
    advantages: list[float]
    mask: list[int]
    chosen: list[int]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def counted(row: Sequence) -> list[int]:
    return [t for t, mask in enumerate(row.mask) if mask]


def ratio_of(now: list[float], row: Sequence, t: int) -> float:
    return math.exp(now[t] - row.old[t])


def ppo_clip(
    row: Sequence, now: list[float], still: list[float], t: int, clip_low=0.2, clip_high=0.2, dual_clip=None
) -> float:
    ratio, advantage = ratio_of(now, row, t), row.advantages[t]
    objective = min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


def reinforce(row: Sequence, now: list[float], still: list[float], t: int) -> float:
    return -row.advantages[t] * now[t]


def gspo(row: Sequence, now: list[float], still: list[float], t: int, clip_low=3e-4, clip_high=4e-4) -> float:
    """The sequence form, equation 5: its ratio depends on every token of the sequence."""
    places = counted(row)
    ratio = math.exp(sum(now[s] - row.old[s] for s in places) / len(places))
    return -min(ratio * row.advantages[t], clip(ratio, 1 - clip_low, 1 + clip_high) * row.advantages[t])


def gmpo(row: Sequence, now: list[float], still: list[float], t: int, log_clip_low=0.4, log_clip_high=0.4) -> float:
    """The product over tokens of min(ratio^s, clip(ratio)^s)^s with s the sign of the advantage, its |o|-th root."""
    product, places = 1.0, counted(row)
    for s in places:
        sign = 1 if row.advantages[s] > 0 else -1
        ratio = ratio_of(now, row, s)
        bounded = clip(ratio, math.exp(-log_clip_low), math.exp(log_clip_high))
        product *= min(ratio**sign, bounded**sign) ** sign
    return -row.advantages[t] * product ** (1 / len(places))


def cispo(row: Sequence, now: list[float], still: list[float], t: int, clip_low=1.0, clip_high=4.0) -> float:
    weight = clip(ratio_of(still, row, t), 1 - clip_low, 1 + clip_high)
    return -weight * row.advantages[t] * now[t]


def sapo(row: Sequence, now: list[float], still: list[float], t: int, gate_positive=1.0, gate_negative=1.05) -> float:
    tau = gate_positive if row.advantages[t] > 0 else gate_negative
    gate = 4 / tau / (1 + math.exp(-tau * (ratio_of(now, row, t) - 1)))
    return -gate * row.advantages[t]


def clip_cov(row: Sequence, now: list[float], still: list[float], t: int, clip_low=0.2, clip_high=0.2) -> float:
    return ppo_clip(row, still if row.chosen[t] else now, still, t, clip_low, clip_high)


def kl_cov(row: Sequence, now: list[float], still: list[float], t: int, covariance_pull=1.0) -> float:
    pull = covariance_pull * abs(now[t] - row.old[t]) if row.chosen[t] else 0.0
    return -ratio_of(now, row, t) * row.advantages[t] + pull


def dppo(
    row: Sequence,
    now: list[float],
    still: list[float],
    t: int,
    divergence="tv",
    divergence_bound=0.15,
    weight_bound=20.0,
) -> float:
    p, old, advantage = math.exp(still[t]), math.exp(row.old[t]), row.advantages[t]
    moved = abs(p - old)
    if divergence == "kl":
        moved = old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))
    if moved > divergence_bound and ((advantage > 0 and p > old) or (advantage <= 0 and p < old)):
        return 0.0
    return -min(p / old, weight_bound) * advantage * now[t]


def aggregated(rows: list[Sequence], losses: list[list[float]], mode: str) -> float:
    """The definitions; rows without a counted token are in no average."""
    sums = [sum(values) for values in losses if values]
    means = [sum(values) / len(values) for values in losses if values]
    return {
        "token-mean": sum(sums) / sum(len(values) for values in losses),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-mean": sum(means) / len(means),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / MAX_TOKENS,
    }[mode]


TokenLoss = Callable[..., float]


def objective(
    loss: TokenLoss, rows: list[Sequence], now: list[list[float]], mode: str, settings: dict[str, Any]
) -> float:
    """The loss of a mini-batch with `now` as log-probabilities; stopped gradients keep the rows' own."""
    values = [
        [loss(row, moving, row.logprobs, t, **settings) for t in counted(row)]
        for row, moving in zip(rows, now, strict=True)
    ]
    return aggregated(rows, values, mode)


def differences(
    loss: TokenLoss, rows: list[Sequence], mode: str, settings: dict[str, Any], step: float = 1e-6
) -> list[float]:
    """The gradient by every log-probability, by central differences."""
    gradient = []
    for index, row in enumerate(rows):
        for t in range(len(row.mask)):
            ends = []
            for sign in (1, -1):
                now = [list(other.logprobs) for other in rows]
                now[index][t] += sign * step
                ends.append(objective(loss, rows, now, mode, settings))
            gradient.append((ends[0] - ends[1]) / (2 * step))
    return gradient


# ---- the same rows as tensors ----------------------------------------------------------------------------------------


def packed(rows: list[Sequence], leaf: bool = True, dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
    """Rows one after the other, nothing padded."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=dtype)

    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row.mask))
    return PolicyLossInputs(
        flat("logprobs").requires_grad_(leaf),
        flat("old"),
        flat("advantages"),
        flat("mask"),
        torch.tensor(offsets),
        flat("chosen"),
    )


def denominators(rows: list[Sequence]) -> Denominators:
    """Counts over a mini-batch."""
    tokens = [sum(row.mask) for row in rows]
    return Denominators(sum(tokens), sum(count > 0 for count in tokens), MAX_TOKENS)
