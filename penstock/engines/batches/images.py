"""Images in packed rows: which tokens of a run stand for which parts of which images, and where they are in 3-D.

A prompt says of each of its images four numbers: its digest, at which token of the prompt it begins, and how many rows
and columns of tokens it has. From then on token c of all distinct images of a file is -1 - c. So prompts with the same
words and other images are different prompts, and what shares prefixes (trees.py) needs to know nothing of images.

Positions are those of Qwen2-VL (M-RoPE, arXiv 2409.12191): a token of text has one number three times; a token of an
image has its row and its column added to the second and the third; text goes on behind the larger of the two.

Suffixes: `_I` distinct images of a file, `_C` their tokens, `_M` tokens of a run that stand for images, `_R` tokens of
whole rows. Left out: the images themselves (penstock/data/images.py), their features
(penstock/engines/models/seeing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.base.ragged import Ragged, offsets_of

NUMBERS = 4  # of an image: digest, first token, rows, columns


@dataclass(frozen=True)
class PackedImages:
    """What a run has of images.

    Attributes:
        digests: the distinct images of the run, whose features come one after the other.
        at_M: index into the run's tokens.
        feature_M: index into those features.
        positions_3N: of every token of the run.
    """

    digests: tuple[int, ...]
    at_M: torch.Tensor
    feature_M: torch.Tensor
    positions_3N: torch.Tensor


@dataclass(frozen=True)
class ImageTokens:
    """The distinct images of some rows; `offsets_I1` into their tokens, of which each has a row and a column.

    `advance_C`: by how much the position of the token behind it is larger than that at which its image begins.
    """

    digests_I: np.ndarray
    offsets_I1: np.ndarray
    row_C: np.ndarray
    column_C: np.ndarray
    advance_C: np.ndarray

    def positions(self, tokens_R: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Return positions_3R of whole rows."""
        seen_R = tokens_R < 0
        codes_M = -1 - tokens_R[seen_R]
        step_R = np.ones(len(tokens_R), np.int64)
        step_R[seen_R] = self.advance_C[codes_M]
        before_R1 = offsets_of(step_R)
        starts_B = offsets_of(lengths_B)[:-1]
        positions_3R = np.repeat((before_R1[:-1] - np.repeat(before_R1[starts_B], lengths_B))[None], 3, axis=0)
        positions_3R[1, seen_R] += self.row_C[codes_M]
        positions_3R[2, seen_R] += self.column_C[codes_M]
        return positions_3R

    def packed(
        self, tokens_N: np.ndarray, positions_3N: np.ndarray, put: Callable[[np.ndarray], torch.Tensor]
    ) -> PackedImages:
        """Return what a run with these tokens has of the images; `put` brings an array to the device."""
        at_M = np.flatnonzero(tokens_N < 0)
        codes_M = -1 - tokens_N[at_M]
        used, which_M = np.unique(np.searchsorted(self.offsets_I1, codes_M, "right") - 1, return_inverse=True)
        begins = offsets_of(np.diff(self.offsets_I1)[used])[:-1]
        feature_M = codes_M - self.offsets_I1[used][which_M] + begins[which_M]
        arrays = (put(np.ascontiguousarray(array)) for array in (at_M, feature_M, positions_3N))
        return PackedImages(tuple(self.digests_I[used].tolist()), *arrays)


def with_images(prompts: Ragged, images: Ragged) -> tuple[Ragged, ImageTokens]:
    """Return prompts in which tokens of images say which of which they are, and what they say it of.

    Args:
        images: of each prompt, `NUMBERS` numbers of each of its images.

    Raises:
        ValueError: an image does not lie within its prompt.
    """
    numbers = images.values_T.reshape(-1, NUMBERS)
    prompt_of = np.repeat(np.arange(len(prompts)), images.lengths_B // NUMBERS)
    digests_I, first_I, which = np.unique(numbers[:, 0], return_index=True, return_inverse=True)
    rows_I, columns_I = numbers[first_I, 2], numbers[first_I, 3]
    counts_I = rows_I * columns_I
    offsets_I1 = offsets_of(counts_I)
    if (numbers[:, 1] + counts_I[which] > prompts.lengths_B[prompt_of]).any():
        raise ValueError("an image has more tokens than are left of its prompt")
    coded = prompts.values_T.copy()
    for prompt, image, at in zip(prompt_of.tolist(), which.tolist(), numbers[:, 1].tolist(), strict=True):
        begin = prompts.offsets_B1[prompt] + at
        coded[begin : begin + counts_I[image]] = -1 - np.arange(offsets_I1[image], offsets_I1[image + 1])
    within_C = np.arange(offsets_I1[-1]) - np.repeat(offsets_I1[:-1], counts_I)
    row_C, column_C = np.divmod(within_C, np.repeat(columns_I, counts_I))
    advance_C = np.zeros(offsets_I1[-1], np.int64)
    advance_C[offsets_I1[1:] - 1] = np.maximum(rows_I, columns_I)
    return Ragged(coded, prompts.offsets_B1), ImageTokens(digests_I, offsets_I1, row_C, column_C, advance_C)
