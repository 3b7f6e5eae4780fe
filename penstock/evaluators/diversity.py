"""How varied the responses are, over tokens: distinct n-grams, their entropy, and repetition inside a response.

Falling figures at a rising reward say that the policy narrows down. They depend on how much text there is, so compare
them between evaluations of the same prompts and the same number of responses. Left out: intervals, since a resample
of prompts holds some of them several times, and that alone lowers diversity.
"""

from __future__ import annotations

import numpy as np

from penstock.base.ragged import Ragged
from penstock.evaluators.heldout import HeldOut

ORDERS = (1, 2, 3)
REPEATED = 4  # length of an n-gram that counts as repeated


class Diversity:
    """`distinct_1` to `distinct_3`, `ngram_entropy_1` to `ngram_entropy_3`, `repetition`."""

    name = "diversity"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        """Return the figures that exist: responses shorter than n tokens have no n-gram.

        `distinct_n`: different n-grams of all responses over all their n-grams (Li et al. 2016, arXiv:1510.03055).
        `ngram_entropy_n`: entropy of the n-grams' frequencies, nats (Zhang et al. 2018, arXiv:1809.05972).
        `repetition`: share of a response's 4-grams that occur in it before, mean over responses that have any
        (seq-rep-4 of Welleck et al. 2019, arXiv:1908.04319).
        """
        figures: dict[str, float] = {}
        for order in ORDERS:
            grams_K, _ = ngrams(heldout.tokens, order)
            if grams_K.size:
                share_G = np.bincount(grams_K) / grams_K.size
                figures[f"distinct_{order}"] = share_G.size / grams_K.size
                figures[f"ngram_entropy_{order}"] = max(0.0, float(-(share_G * np.log(share_G)).sum()))
        grams_K, rows_K = ngrams(heldout.tokens, REPEATED)
        if grams_K.size:
            figures["repetition"] = float(repeated_share(grams_K, rows_K).mean())
        return figures


def ngrams(tokens: Ragged, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Return of each n-gram (K of them, none across rows) a number from 0 without gaps, equal for equal ones, and its
    row."""
    lengths_B = tokens.lengths_B
    rows_T = np.repeat(np.arange(len(tokens)), lengths_B)
    starts_K = np.flatnonzero(np.arange(len(rows_T)) + order <= tokens.offsets_B1[1:][rows_T])
    _, ids_T = np.unique(tokens.values_T, return_inverse=True)
    ids_T = ids_T.astype(np.int64)
    grams_K = np.zeros(len(starts_K), np.int64)
    for step in range(order):
        # Numbered anew at each step, so that the product stays far below the largest integer.
        _, grams_K = np.unique(grams_K * (len(ids_T) + 1) + ids_T[starts_K + step], return_inverse=True)
    return grams_K, rows_T[starts_K]


def repeated_share(grams_K: np.ndarray, rows_K: np.ndarray) -> np.ndarray:
    """Return for each row with n-grams the share of them that repeats an earlier one of the row."""
    _, first_D = np.unique(rows_K * (grams_K.max() + 1) + grams_K, return_index=True)
    all_B = np.bincount(rows_K)
    distinct_B = np.bincount(rows_K[first_D], minlength=len(all_B))
    some_B = all_B > 0
    return 1 - distinct_B[some_B] / all_B[some_B]
