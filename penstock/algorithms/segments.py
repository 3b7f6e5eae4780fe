"""Sums and look-ups over the rows of a packed batch, for numpy arrays and torch tensors.

Row b of a flat array ``x_T`` is ``x_T[offsets_B1[b]:offsets_B1[b + 1]]``; offsets start at 0 and end at T. A row may
be empty, which is where ``np.add.reduceat`` alone goes wrong: for an empty segment it returns the element that
follows instead of 0.

Shapes: _T flat response tokens, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array", np.ndarray, "Tensor")


def lengths(offsets_B1: Array) -> Array:
    """Number of tokens of each row, shape _B."""
    return offsets_B1[1:] - offsets_B1[:-1]


def rows_of_tokens(offsets_B1: Array, tokens: int | None = None) -> Array:
    """Index of the row that each token belongs to, shape _T.

    Args:
        offsets_B1: where rows begin and end.
        tokens: their number, if known: without it torch waits for the device to tell how much to allocate.
    """
    lengths_B = lengths(offsets_B1)
    if isinstance(lengths_B, np.ndarray):
        return np.repeat(np.arange(lengths_B.size), lengths_B)
    import torch

    return torch.repeat_interleave(lengths_B, output_size=tokens)


def segment_sum(values_T: np.ndarray, offsets_B1: np.ndarray) -> np.ndarray:
    """Sum of each row in float64, shape _B; an empty row sums to 0."""
    sums_B = np.zeros(offsets_B1.size - 1)
    filled_B = lengths(offsets_B1) > 0
    # Empty rows hold no token, so the starts of the others alone cut the array where it has to be cut.
    if filled_B.any():
        sums_B[filled_B] = np.add.reduceat(values_T.astype(np.float64), offsets_B1[:-1][filled_B])
    return sums_B


def discounted_sums(values_T: np.ndarray, offsets_B1: np.ndarray, decay: float) -> np.ndarray:
    """s_t = x_t + decay s_(t+1) within each row, shape _T, in float64."""
    lengths_B = lengths(offsets_B1)
    longest_first_B = np.argsort(-lengths_B, kind="stable")
    ends_B = offsets_B1[1:][longest_first_B]
    # One step of the loop serves all rows, from their ends backwards. With the longest rows first, those that reach
    # t tokens back are a prefix: no padding and no mask.
    rows_reaching = np.searchsorted(-lengths_B[longest_first_B], -np.arange(lengths_B.max(initial=0)))
    sums_T = np.empty(values_T.size)
    carry_B = np.zeros(lengths_B.size)
    for back, rows in enumerate(rows_reaching, start=1):
        at = ends_B[:rows] - back
        carry_B[:rows] = values_T[at] + decay * carry_B[:rows]
        sums_T[at] = carry_B[:rows]
    return sums_T


def segment_sum_torch(values_T: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each row, shape _B, differentiable; an empty row sums to 0.

    Neither waits for the device nor adds in varying order, as ``index_add`` would on a GPU.
    """
    import torch

    return torch.segment_reduce(values_T, "sum", offsets=offsets_B1, initial=0)


def segment_max_torch(values_T: Tensor, offsets_B1: Tensor) -> Tensor:
    """Largest value of each row, shape _B, of values not below 0; that of an empty row is 0."""
    import torch

    return torch.segment_reduce(values_T, "max", offsets=offsets_B1, initial=0)
