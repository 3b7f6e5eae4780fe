"""How losses per token become the one number that is differentiated.

A mini-batch is spread over ranks and cut into micro-batches of unequal size, so an average taken within one of them
would weigh its tokens by the company they keep. Here a micro-batch only sums; what it divides by is counted over the
whole mini-batch beforehand. The shares of all micro-batches and ranks then add up to the loss, however it was split.
A rank whose gradients will be averaged over ranks multiplies its share by the number of ranks; that is the caller's.

Shapes: _T flat response tokens of a packed micro-batch, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.algorithms.segments import segment_sum_torch

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS: tuple[str, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole mini-batch, all ranks together.

    Args:
        tokens: counted tokens (mask 1).
        sequences: rows with at least one counted token; a row without any is in no average.
        max_tokens: the constant of ``seq-mean-token-sum-norm``, usually the longest response allowed.

    Raises:
        ValueError: a count is not positive. A mini-batch with nothing counted has no mean; skip its update.
    """

    tokens: float
    sequences: float
    max_tokens: float

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences, self.max_tokens) <= 0:
            raise ValueError(f"{self} cannot divide a loss: a mini-batch without a counted token has to be skipped")


def weight_of_sums(mode: str, denominators: Denominators) -> float:
    """What shares of a loss weigh that were taken before the counts were known, with 1 token and 1 sequence in place.

    Raises:
        ValueError: as `aggregate`.
    """
    match mode:
        case "token-mean":
            return 1 / denominators.tokens
        case "token-sum":
            return 1.0
        case "seq-mean-token-sum" | "seq-mean-token-mean" | "seq-mean-token-sum-norm":
            return 1 / denominators.sequences
    raise ValueError(f"unknown aggregation {mode!r}; there are {', '.join(AGGREGATIONS)}")


def aggregate(loss_T: Tensor, mask_T: Tensor, offsets_B1: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This micro-batch's share of the loss, a scalar; the shares of a mini-batch add up to its loss.

    - ``token-mean``: every counted token weighs the same.
    - ``token-sum``: the sum over counted tokens.
    - ``seq-mean-token-sum``: the mean over sequences of the sum over their tokens.
    - ``seq-mean-token-mean``: every sequence weighs the same, whatever its length.
    - ``seq-mean-token-sum-norm``: ``seq-mean-token-sum`` over the constant ``max_tokens`` (Dr. GRPO, Liu et al. 2025,
      arXiv 2503.20783, listing 1).

    Raises:
        ValueError: the mode is none of ``AGGREGATIONS``.
    """
    counted_T = loss_T * mask_T
    match mode:
        case "token-mean":
            return counted_T.sum() / denominators.tokens
        case "token-sum":
            return counted_T.sum()
        case "seq-mean-token-sum":
            return counted_T.sum() / denominators.sequences
        case "seq-mean-token-mean":
            tokens_B = segment_sum_torch(mask_T, offsets_B1).clamp(min=1)
            return (segment_sum_torch(counted_T, offsets_B1) / tokens_B).sum() / denominators.sequences
        case "seq-mean-token-sum-norm":
            return counted_T.sum() / (denominators.sequences * denominators.max_tokens)
    raise ValueError(f"unknown aggregation {mode!r}; there are {', '.join(AGGREGATIONS)}")
