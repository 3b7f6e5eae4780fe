"""The reward of configs/careless.yaml in parts, for algorithms that normalise each part by itself (GDPO)."""

from __future__ import annotations


def sum_and_digits(response: str, answer: str, suffix: str = "") -> dict[str, float]:
    """Return the parts `sum`, 1 for the right answer, and `digits`, the share of its characters in their places.

    The reward itself is `sum` alone, as of `penstock.rewards.builtin:exact_match`, so that accuracies can be compared.
    """
    given, wanted = response.strip(), answer + suffix
    right = float(given == wanted)
    return {"reward": right, "sum": right, "digits": sum(map(str.__eq__, given, wanted)) / len(wanted)}
