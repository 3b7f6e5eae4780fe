"""A run as a comparison sees it, wherever it was read: its settings, figures by iteration and summary.

Read are runs of MLflow (recorded.py) and run folders (folders.py). What comes of a run is one number a name here:
`outcome`. Left out: several runs (tables.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

CURVES = {"reward/mean": "Mean reward", "heldout/accuracy": "Held-out accuracy"}

READ = (  # metrics whose values of all iterations count
    *CURVES,
    *("time/iteration_s", "rollout/tokens", "rollout/tokens_per_s", "rollout/unused_share", "actor/tokens"),
)

SEED = "seed"


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Attributes:
        name: told apart from those of the runs beside it.
        status: how it stands, in the words of where it was read.
        completed: whether it came to its end; figures of one that did not are those of another length of training.
        settings: its configuration by dotted key, as text.
        histories: of the metrics in READ, values by iteration, in order; without those that are not finite.
        last: the newest value of every metric, finite.
        summary: content of its `summary.json`; empty if there is none yet.
        folder: its run folder, on the machine that trained it.
        tracked: what the tracker calls the run; empty where it was not asked.
    """

    name: str
    status: str
    completed: bool
    settings: Mapping[str, str]
    histories: Mapping[str, Mapping[int, float]]
    last: Mapping[str, float]
    summary: Mapping[str, Any]
    folder: Path | None = None
    tracked: str = ""

    @property
    def seed(self) -> str:
        """The seed; empty where none is known."""
        return self.settings.get(SEED, "")

    @property
    def outcome(self) -> dict[str, float]:
        """What came of it; NaN for what it did not record.

        `reward/mean` and `heldout/accuracy` are the last ones, `s/iteration` is the median, `tokens/s` are those
        generated over whole iterations, as in the summary; then totals: GPU hours, tokens generated and trained on.
        """
        return {
            "reward/mean": self._final("reward/mean"),
            "heldout/accuracy": self._final("heldout/accuracy"),
            "heldout/accuracy best": max(self._history("heldout/accuracy").values(), default=math.nan),
            "s/iteration": median(self._history("time/iteration_s").values() or [math.nan]),
            "tokens/s": self._tokens_per_second(),
            "GPU hours": gpu_hours(self.summary),
            "tokens generated": self._generated(),
            "tokens trained": _sum(self._history("actor/tokens")),
        }

    def _history(self, metric: str) -> Mapping[int, float]:
        return self.histories.get(metric, {})

    def _final(self, metric: str) -> float:
        return [math.nan, *self._history(metric).values()][-1]

    def _tokens_per_second(self) -> float:
        """Generated tokens over the time of the iterations that generated them, as `summary.json` has it."""
        steps = [step for step in self._history("rollout/tokens_per_s") if step > 0]
        seconds = sum(self._history("time/iteration_s").get(step, 0.0) for step in steps)
        tokens = sum(self._history("rollout/tokens").get(step, 0.0) for step in steps)
        return tokens / seconds if seconds else math.nan

    def _generated(self) -> float:
        """Response tokens of all iterations, with those that no batch made use of (`rollout.carry`, `rollout.tail`)."""
        unused = self._history("rollout/unused_share")
        return _sum({n: tokens / (1 - unused.get(n, 0.0)) for n, tokens in self._history("rollout/tokens").items()})


def gpu_hours(summary: Mapping[str, Any]) -> float:
    """Return for how long a run held its GPUs, all attempts together; NaN where its summary does not tell.

    Counted are the GPUs of the last attempt, without those of elastic groups.
    """
    gpus, seconds = summary.get("gpus"), summary.get("seconds")
    return math.nan if gpus is None or seconds is None else gpus * seconds / 3600


def _sum(history: Mapping[int, float]) -> float:
    return sum(history.values()) if history else math.nan
