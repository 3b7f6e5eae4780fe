"""A reward with a spread for models with random weights: benchmarks then measure updates that change something."""

from __future__ import annotations

import time


def share_of_digits(response: str) -> float:
    """Return the share of characters that are digits."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def slow_share_of_digits(response: str, seconds: float) -> float:
    """Return the same after a pause, as a sandbox or a parser would take it."""
    time.sleep(seconds)
    return share_of_digits(response)
