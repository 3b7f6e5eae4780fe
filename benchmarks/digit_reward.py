"""A reward with a spread for models with random weights: benchmarks then measure updates that change something."""

from __future__ import annotations


def share_of_digits(response: str) -> float:
    """Return the share of characters that are digits."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
