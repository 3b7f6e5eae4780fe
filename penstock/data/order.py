"""The order in which prompts are taken: a pure function of the seed, so that a resumed run continues it exactly.

Ordinals count prompts from the beginning of the training: ordinal `o` belongs to epoch `o // size`. An epoch takes each
prompt once. The order is the argsort of raw PCG64 draws seeded by (seed, epoch): NumPy promises never to change the
streams of bit generators and seed sequences, which it does not promise for `Generator.permutation`.
"""

from __future__ import annotations

import numpy as np


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the row indices (int64, `size` of them) in the order of an epoch; file order without `shuffle`."""
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.int64)


def take(cursor: int, count: int, size: int, seed: int, shuffle: bool) -> np.ndarray:
    """Return the row indices (int64) of the ordinals `cursor` to `cursor + count - 1`.

    Args:
        cursor: prompts taken before.
        count: prompts wanted; they may span any number of epochs.
        size: rows of the table, at least 1.
        seed: the run's seed.
        shuffle: a new order in every epoch, or file order.
    """
    first, last = cursor // size, (cursor + count - 1) // size
    rows = np.concatenate([epoch_order(size, seed, epoch, shuffle) for epoch in range(first, max(first, last) + 1)])
    start = cursor - first * size
    return rows[start : start + count]
