"""Samplers as users write them, and some that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np


# The example of docs/recipes.md, which shows it without types.
def by_topic(table, count, cursor, seed, history, column="topic"):  # type: ignore[no-untyped-def]
    """Draw from topics in proportion to what is still missing there to a mean reward of 1."""
    topics = table[column].astype("category").cat.codes.to_numpy()
    drawn, number = topics[history.rows_V], topics.max() + 1
    earned = np.bincount(drawn, weights=history.rewards_V, minlength=number)
    missing = 1.0 - (earned + 0.5) / (np.bincount(drawn, minlength=number) + 1.0)
    weights = missing[topics] / missing[topics].sum()
    return np.random.default_rng([seed, cursor]).choice(len(table), count, replace=False, p=weights)


def forgetful(table: Any, count: int) -> Any:
    """Another draw at every call."""
    return np.random.default_rng().permutation(len(table))[:count]


def too_few(count: int) -> Any:
    """One row less than asked for."""
    return np.arange(count - 1)


def beyond(table: Any, count: int) -> Any:
    """Rows that are not there."""
    return np.arange(count) + len(table)


def no_rows(count: int) -> Any:
    """Numbers, but no row numbers."""
    return np.linspace(0, 1, count)


def raises(count: int) -> Any:
    """What a typing error does."""
    raise LookupError(f"no such topic ({count})")


def asks_for_more(count: int, temperature: float) -> Any:
    """An argument that samplers do not get."""
    return np.arange(count)
