"""The held-out figures of a run as text, with their intervals: one wording for all that show them.

An accuracy says nothing without how its responses were sampled: the metrics beside it hold that, `how_sampled` says it.

Left out: computing them (penstock/evaluators/), and curves (penstock/reports/plots.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LABELS = {
    "heldout/accuracy": "accuracy",
    "heldout/greedy_accuracy": "accuracy of greedy responses",
    "heldout/reward": "mean reward",
    "heldout/response_length_mean": "response length, tokens",
    "heldout/truncated_share": "truncated, share",
    "heldout/kl": "KL to the reference, nats per token",
    "heldout/distinct_2": "distinct bigrams, share",
    "heldout/ngram_entropy_2": "entropy of bigrams, nats",
    "heldout/repetition": "repetition, share",
    "heldout/evaluator_failures": "evaluators that failed",
}
TEMPERATURE = "heldout/temperature"
_OF_SEVERAL = re.compile(r"heldout/(mean|best|worst|majority|pass)_at_(\d+)")


@dataclass(frozen=True)
class Figure:
    """One line of the table: what it is, and its values in the first and in the last evaluation."""

    label: str
    first: str
    last: str


def evaluation_figures(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the figures of the first and the last record that have an accuracy; nothing without any."""
    evaluations = [record["metrics"] for record in records if "heldout/accuracy" in record["metrics"]]
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    how = [Figure("responses", how_sampled(first) or "–", how_sampled(last))] if how_sampled(last) else []
    figures = shown(last).items()
    return how + [Figure(label, with_interval(first, name), with_interval(last, name)) for name, label in figures]


def how_sampled(metrics: Mapping[str, float]) -> str:
    """Return how responses were sampled: `greedy`, or `sampled at temperature 1`; empty without an evaluation."""
    return sampled_at(metrics.get(TEMPERATURE))


def greedy_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the accuracy of greedy responses, asked for beside sampled ones or instead of them."""
    instead = "heldout/accuracy" if how_sampled(metrics) == "greedy" else ""
    return metrics.get("heldout/greedy_accuracy", metrics.get(instead))


def sampled_at(temperature: float | None) -> str:
    """Return how responses of a temperature were sampled, as `how_sampled` does; None: nobody knows the temperature."""
    if temperature is None:
        return ""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def shown(names: Iterable[str]) -> dict[str, str]:
    """Return the labels of those metrics that are worth a line, in reading order: rewards, of several responses, rest.

    The figures of a user's own evaluators (`heldout/<evaluator>/<figure>`) are among them.
    """
    present = list(names)
    head, tail = list(_LABELS)[:3], list(_LABELS)[3:]
    several = {name: f"{found[1]}@{found[2]}" for name in present if (found := _OF_SEVERAL.fullmatch(name))}
    own = {
        name: name.removeprefix("heldout/")
        for name in present
        if name.count("/") == 2 and name.startswith("heldout/") and not name.endswith(("/low", "/high"))
    }
    rest = {name: _LABELS[name] for name in tail if name in present}
    return {**{name: _LABELS[name] for name in head if name in present}, **several, **rest, **own}


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """Return a figure and its 95 % interval as text: `0.842 (0.819 to 0.864)`; a dash if it does not exist."""
    if name not in metrics:
        return "–"
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    return _text(metrics[name]) + (f" ({_text(low)} to {_text(high)})" if low is not None and high is not None else "")


def _text(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
