"""`penstock bench learning`: what is trained with which settings, and what a difference may be by chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.accuracy import algorithms, modes
from penstock.benchmarks.accuracy.modes import MODE, SYNCHRONOUS, Comparison, figures_of, measure
from penstock.benchmarks.accuracy.side_by_side import Ended

ROOT = Path(__file__).resolve().parents[3]
TAIL = "rollout.tail={extra: 0.5}"
COMPARISON = Comparison(ROOT / "configs" / "quickstart.yaml", (TAIL,), (3, 4), 2, ("iterations=6",))
AFTER = {"synchronous-3": 0.50, "mode-3": 0.54, "synchronous-4": 0.60, "mode-4": 0.62}


class Trainings:
    """Stands for the processes: what was asked for is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.asked: dict[str, list[str]] = {}
        self.failing = failing
        monkeypatch.setattr(algorithms, "side_by_side", self)
        monkeypatch.setattr(modes, "side_by_side", self)
        monkeypatch.setattr(modes, "read_metrics", lambda run: self.records(AFTER[run.path.name]))

    def __call__(self, commands: dict[str, list[str]], *_: object) -> Iterator[Ended]:
        self.asked |= commands
        for name in commands:
            yield Ended(name, int(name == self.failing), 1.0, "its last line")

    def records(self, after: float) -> list[dict[str, Any]]:
        """As `metrics.jsonl` holds them."""
        values = ((0, 0.3, {"rollout/logprob_gap": 0.2}), (1, 0.4, {"rollout/logprob_gap": 0.1}), (6, after, {}))
        return [{"iteration": n, "metrics": {"heldout/accuracy": value} | more} for n, value, more in values]


def test_both_trainings_of_a_seed_differ_in_the_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start from one warm-up of that seed."""
    trainings = Trainings(monkeypatch)
    result = measure(COMPARISON, "a command", print)
    assert [name for name in trainings.asked if name.startswith("warm-up")] == ["warm-up-3", "warm-up-4"]
    for seed in (3, 4):
        synchronous, mode = (trainings.asked[f"{name}-{seed}"] for name in (SYNCHRONOUS, MODE))
        assert [word for word in mode if word not in synchronous] == [TAIL, mode[-1]]
        assert f"seed={seed}" in synchronous and "iterations=6" in synchronous
        assert any(word.endswith(f"warm-up-{seed}/models/sft") for word in synchronous)
    assert [(row["seed"], row["name"]) for row in result.details] == [
        (seed, name) for seed in (3, 4) for name in (SYNCHRONOUS, MODE)
    ]
    assert result.figures["difference"] == pytest.approx(0.03)
    assert {row["logprob_gap"] for row in result.details} == {0.2}
    assert result.settings["mode"] == [TAIL]


def test_a_mode_that_learns_less_is_outside() -> None:
    """Control: one that learns as much as the mean seed."""
    rows = [{"name": SYNCHRONOUS, "seed": seed, "accuracy_after": 0.6 + 0.01 * seed} for seed in range(5)]
    for shift, within in ((-0.1, 0.0), (0.002, 1.0)):
        mode = [row | {"name": MODE, "accuracy_after": row["accuracy_after"] + shift} for row in rows]
        figures = figures_of([*rows, *mode])
        assert figures["within_synchronous"] == within
        assert figures["difference"] == pytest.approx(shift)
        assert figures["difference_high"] - figures["difference_low"] < 1e-6, "seed by seed they differ alike"


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained, but for a training that fails."""
    with pytest.raises(UserError, match="one seed says nothing"):
        measure(replace(COMPARISON, seeds=(1,)), "a command", print)
    with pytest.raises(UserError, match="no mode is given"):
        measure(replace(COMPARISON, mode=()), "a command", print)
    with pytest.raises(UserError, match=r"rollout\.tail"):
        measure(replace(COMPARISON, mode=("rollout.tail={extra: -1}",)), "a command", print)
    Trainings(monkeypatch, failing="mode-4")
    with pytest.raises(UserError, match=r"1 of 4 trainings failed.*\n.*mode-4.*\nits last line"):
        measure(COMPARISON, "a command", print)
