"""Two results side by side: which figures got worse by more than a tolerance, or are no longer there.

Which direction is better follows from a figure's name; a name that says nothing is shown and not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.machine import kind_of
from penstock.benchmarks.reporting.result import BenchResult
from penstock.trackers.tracker import flatten

Verdict = Literal["better", "same", "worse", "not judged"]


@dataclass(frozen=True)
class Change:
    """One figure of the old result; `new` is None where the new one lacks it.

    `ratio` is new over old, None where there is no new or old is 0.
    """

    name: str
    old: float
    new: float | None
    ratio: float | None
    verdict: Verdict


def direction(name: str) -> int:
    """Return 1 where higher is better, -1 where lower is, 0 where the name does not tell.

    >>> direction("rollout_tokens_per_s"), direction("update_s"), direction("truncated_share")
    (1, -1, 0)
    """
    if name.startswith("accuracy_") or "_per_s" in name or name.endswith("mfu") or "efficiency" in name:
        return 1
    return -1 if name.endswith(("_s", "_bytes", "_gib")) else 0


def compare(old: BenchResult, new: BenchResult, tolerance: float) -> list[Change]:
    """Return the figures that both have, and those that are judged and the new one lacks, in the old one's order.

    Args:
        tolerance: a share of the old figure; a larger change is better or worse.

    Raises:
        UserError: they are results of different benchmarks or kinds of machine, or share no figure.
    """
    if old.bench != new.bench:
        raise UserError(
            f"these are results of different benchmarks: {old.bench} and {new.bench}", "compare two of the same"
        )
    if (was := kind_of(old.machine)) != (now := kind_of(new.machine)):
        raise UserError(f"measured on other kinds of machine: {was} and {now}", "measure both on the same kind")
    if not old.figures.keys() & new.figures.keys():
        raise UserError("the two results have no figure in common", "measure both with the same Penstock")
    judged = [name for name in old.figures if name in new.figures or direction(name)]
    return [_change(name, old.figures[name], new.figures.get(name), tolerance) for name in judged]


def remarks(old: BenchResult, new: BenchResult) -> list[str]:
    """Return what a reader of the comparison should know: other machines or settings, figures that one side lacks."""
    found = []
    if old.machine != new.machine:
        found.append(f"measured on different machines: {old.machine} and {new.machine}")
    before, after = flatten(old.settings), flatten(new.settings)
    if other := [key for key in before if key in after and before[key] != after[key]]:
        found.append("settings differ: " + ", ".join(f"{key} {before[key]} -> {after[key]}" for key in other))
    for which, these, those in (("old", old.figures, new.figures), ("new", new.figures, old.figures)):
        if alone := [name for name in these if name not in those]:
            found.append(f"only in the {which} result: {', '.join(alone)}")
    return found


def _change(name: str, old: float, new: float | None, tolerance: float) -> Change:
    if new is None:  # what is no longer measured could hide any regression
        return Change(name, old, None, None, "worse")
    gain = direction(name) * (new - old)
    verdict: Verdict = "better" if gain > 0 else "worse"
    if not direction(name):
        verdict = "not judged"
    elif abs(new - old) <= tolerance * abs(old):
        verdict = "same"
    return Change(name, old, new, new / old if old else None, verdict)
