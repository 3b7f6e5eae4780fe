"""The headline figures of a run's summary as text: the same words and units in the report and in the terminal.

Left out: anything that is not in `summary.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.reports.evaluation import sampled_at

SHARES_FROM = 0.01  # smaller ones are left out


@dataclass(frozen=True)
class Headline:
    """A label, its value as text, a note beside it, and whether the note is good or bad news."""

    label: str
    value: str
    note: str = ""
    trend: Literal["up", "down", ""] = ""


def headlines(summary: Mapping[str, Any]) -> list[Headline]:
    """Return the figures that `summary` holds, the most important first."""
    found = [
        *_accuracies(summary),
        _change(
            "Held-out accuracy",
            summary.get("heldout_accuracy_before"),
            summary.get("heldout_accuracy"),
            percent=True,
        ),
        _loss(summary.get("loss_first"), summary.get("loss_last")),
        _change("Mean reward", summary.get("reward_first"), summary.get("reward_last"), percent=False),
        _plain("Iterations", summary.get("iterations"), "{:,}"),
        _plain("Steps", summary.get("steps"), "{:,}"),
        Headline("Duration", duration(summary["seconds"])) if summary.get("seconds") is not None else None,
        _plain(
            "Tokens per second",
            summary.get("tokens_per_second"),
            "{:,.0f}",
            "trained on" if "steps" in summary else "generated, over whole iterations",
        ),
        _shares(summary.get("time_shares")),
        _plain("Actor's MFU", summary.get("actor_mfu"), "{:.1%}"),
        _weights(summary.get("parameters_shared"), summary.get("parameters_copied"), summary.get("reshard_strategy")),
    ]
    return [headline for headline in found if headline]


def _accuracies(summary: Mapping[str, Any]) -> list[Headline | None]:
    """Held-out accuracy of greedy responses and of sampled ones, as far as there are such."""
    temperature = summary.get("heldout_temperature")
    of = {"accuracy": 0.0} if temperature == 0.0 else {"greedy": 0.0, "accuracy": temperature}
    return [
        _change(
            "Held-out accuracy",
            summary.get(f"{name}_before"),
            summary.get(f"{name}_after"),
            percent=True,
            how=sampled_at(how),
        )
        for name, how in of.items()
    ]


def duration(seconds: float) -> str:
    """Return seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _change(label: str, before: float | None, after: float | None, *, percent: bool, how: str = "") -> Headline | None:
    if after is None:
        return None
    shape = "{:.1%}" if percent else "{:.3f}"
    if before is None:
        return Headline(label, shape.format(after), how)
    rise = after - before
    note = f"{rise * 100:+.1f} points" if percent else f"{rise:+.3f}"
    trend: Literal["up", "down", ""] = "up" if rise > 0 else "down" if rise < 0 else ""
    note += f", {how}" if how else ""
    return Headline(label, f"{shape.format(before)} → {shape.format(after)}", note, trend)


def _loss(first: float | None, last: float | None) -> Headline | None:
    if first is None or last is None:
        return None
    return Headline("Loss", f"{first:.3f} → {last:.3f}", f"{last - first:+.3f}", "up" if last < first else "down")


def _plain(label: str, value: float | None, shape: str, note: str = "") -> Headline | None:
    return None if value is None else Headline(label, shape.format(value), note)


def _shares(shares: Mapping[str, float] | None) -> Headline | None:
    """Where the time goes: the task with the largest share, the next ones beside it."""
    if not shares:
        return None
    first, *rest = [f"{task.replace('_', ' ')} {share:.0%}" for task, share in shares.items() if share >= SHARES_FROM]
    return Headline("Time goes to", first, ", ".join(rest))


def _weights(shared: int | None, copied: int | None, strategy: str | None) -> Headline | None:
    """Weight tensors that the rollout engine reads in the actor's memory, against those a reshard writes, and how."""
    if shared is None and copied is None:
        return None
    way = "" if strategy in (None, "shared") else f" by {strategy}"
    return Headline(
        "Weights shared", f"{shared or 0:,} tensors", f"with the rollout engine, {copied or 0:,} copied{way}"
    )
