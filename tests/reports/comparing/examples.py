"""Runs made up for comparisons, in place of those that MLflow or a folder would have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.reports.comparing.runs import ComparedRun

RATE = "actor.optimizer.learning_rate"


def run(
    name: str, rate: str, seed: int, accuracies: Sequence[float], *, completed: bool = True, **more: Any
) -> ComparedRun:
    """Return a run of a learning rate and a seed, with a held-out accuracy before it and after each iteration."""
    steps = range(1, len(accuracies))
    histories: dict[str, dict[int, float]] = {
        "heldout/accuracy": dict(enumerate(accuracies)),
        "reward/mean": {step: accuracies[step] / 2 for step in steps},
        "time/iteration_s": dict.fromkeys(steps, 2.0),
        "rollout/tokens": dict.fromkeys(steps, 100.0),
        "rollout/tokens_per_s": dict.fromkeys(steps, 80.0),
        "actor/tokens": dict.fromkeys(steps, 200.0),
    }
    settings = {"name": name, "seed": str(seed), RATE: rate, "iterations": str(len(steps))}
    summary = {"status": "completed", "seconds": 1800.0, "gpus": 4} if completed else {}
    last = {metric: [*values.values()][-1] for metric, values in histories.items()} | {"iteration": float(len(steps))}
    values = {"status": "FINISHED" if completed else "FAILED", "histories": histories, "summary": summary, **more}
    return ComparedRun(name=name, completed=completed, settings=settings, last=last, **values)


def two_groups(folder: Path | None = None) -> list[ComparedRun]:
    """Return two groups of three seeds, whose last accuracies are those of test_statistics.py."""
    slow = [run(f"slow-{seed}", "1e-06", seed, (0.3, 0.5, last)) for seed, last in enumerate((0.57, 0.66, 0.78))]
    fast = [run(f"fast-{seed}", "3e-06", seed, (0.3, 0.9, last)) for seed, last in enumerate((0.60, 0.70, 0.80))]
    return [*slow, *fast]
