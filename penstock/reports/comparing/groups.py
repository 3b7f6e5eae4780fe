"""Runs that differ in their seed alone, together: their means with intervals, and how groups differ.

Means are over runs that came to their end; the others would be compared at another length of training.

Left out: the statistics (statistics.py), and how a group is shown (tables.py).
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product

from penstock.reports.comparing.runs import SEED, ComparedRun
from penstock.reports.comparing.statistics import Difference, difference, interval

LABELS = ("name", "folder")  # settings that name a run and change nothing in it

MEASURES = {
    "reward/mean": "mean reward, last",
    "heldout/accuracy": "held-out accuracy, last",
    "heldout/accuracy best": "held-out accuracy, best",
    "s/iteration": "seconds per iteration",
    "tokens/s": "tokens per second",
}

TOTALS = ("GPU hours", "tokens generated", "tokens trained")


@dataclass(frozen=True)
class Group:
    """Runs of the same settings but for the seed.

    Attributes:
        label: a letter; `A` is the group that others are compared with.
        differing: its settings that are not the same in all groups.
        runs: all of them.
    """

    label: str
    differing: Mapping[str, str]
    runs: tuple[ComparedRun, ...]

    @property
    def completed(self) -> list[ComparedRun]:
        """The runs that came to their end."""
        return [run for run in self.runs if run.completed]

    @property
    def title(self) -> str:
        """The label, with what makes the group another one."""
        settings = ", ".join(f"{name}={value}" for name, value in self.differing.items())
        return f"{self.label}: {settings}" if settings else self.label

    def values(self, measure: str) -> dict[str, list[float]]:
        """Return a measure of the completed runs that have it, by seed."""
        found: dict[str, list[float]] = {}
        for run in self.completed:
            if not math.isnan(value := run.outcome[measure]):
                found.setdefault(run.seed, []).append(value)
        return found

    def mean(self, measure: str) -> Mean | None:
        """Return the mean over its completed runs; None: none has it."""
        values = [value for runs in self.values(measure).values() for value in runs]
        if not values:
            return None
        low, high = interval(values) if len(values) > 1 else (math.nan, math.nan)
        return Mean(sum(values) / len(values), low, high, len(values))

    def total(self, measure: str) -> float:
        """Return the sum over all its runs, also those that did not come to their end; NaN where one does not tell."""
        return sum(run.outcome[measure] for run in self.runs)


@dataclass(frozen=True)
class Mean:
    """A mean over runs and the ends of its 95 % interval, which are NaN for a single run."""

    value: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Contrast:
    """What a measure of a group differs by from that of another, and what chance explains of it."""

    group: str
    against: str
    measure: str
    difference: Difference


def grouped(runs: Sequence[ComparedRun]) -> list[Group]:
    """Return the groups, in the order of their first runs."""
    found: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run in runs:
        found.setdefault(tuple(sorted(settings_of(run).items())), []).append(run)
    everything = [dict(key) for key in found]
    names = sorted({name for settings in everything for name in settings})
    differing = [name for name in names if len({settings.get(name) for settings in everything}) > 1]
    return [
        Group(label, {name: settings[name] for name in differing if name in settings}, tuple(members))
        for label, settings, members in zip(_letters(len(found)), everything, found.values(), strict=True)
    ]


def settings_of(run: ComparedRun) -> dict[str, str]:
    """Return what makes a run's group: all its settings but its seed and its names."""
    return {name: value for name, value in run.settings.items() if name not in (SEED, *LABELS)}


def contrasts(groups: Sequence[Group], against: Group) -> list[Contrast]:
    """Return how each other group differs from one, in every measure of which both have several values."""
    return [
        Contrast(group.label, against.label, measure, found)
        for group in groups
        if group is not against
        for measure in MEASURES
        if (found := difference(group.values(measure), against.values(measure))) is not None
    ]


def pair(groups: Sequence[Group]) -> tuple[ComparedRun, ComparedRun] | None:
    """Return two runs to read side by side: of the first two groups, of one seed where there is one; else of one."""
    if len(groups) > 1:
        one, two = groups[0].runs, groups[1].runs
        return next(((a, b) for a in one for b in two if a.seed == b.seed), (one[0], two[0]))
    runs = groups[0].runs if groups else ()
    return (runs[0], runs[1]) if len(runs) > 1 else None


def _letters(number: int) -> list[str]:
    words = ("".join(letters) for length in count(1) for letters in product(string.ascii_uppercase, repeat=length))
    return [next(words) for _ in range(number)]
