"""Why the reward moved between two iterations: figures of all responses, and the prompts that lost most.

Held-out prompts are the same in every evaluation. Training prompts come again with each epoch, so two iterations may
have none in common: their figures are compared all the same, which says less, since the prompts differ.

Left out: whether a difference is more than chance (`heldout/reward/low` and `/high` are the ends of its interval).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd

from penstock.reports.samples.reading import LENGTH, PART, Response, Samples
from penstock.state.prompt_rewards import Rollouts
from penstock.state.run_folder import RunFolder


@dataclass(frozen=True)
class Figure:
    """A mean over all responses, before and after; None: not known there."""

    name: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Fallen:
    """A prompt that both iterations answered: its mean rewards, the best response before and the worst after.

    A response is None where the iteration's experience is gone and its table of samples has none to the prompt.
    """

    prompt_id: str
    before: float
    after: float
    best_before: Response | None
    worst_after: Response | None

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """What two iterations differ in.

    Attributes:
        before, after: what is compared.
        prompts: that both answered.
        lost, gained: how many of them earn less or more on the mean.
        fallen: those that lost most, the most first.
    """

    before: Samples
    after: Samples
    figures: list[Figure]
    prompts: int
    lost: int
    gained: int
    fallen: list[Fallen]


def compared(run: RunFolder, before: Samples, after: Samples, limit: int) -> Comparison:
    """Compare two iterations.

    Args:
        limit: prompts to show.
    """
    means = pd.DataFrame({"before": _by_prompt(run, before), "after": _by_prompt(run, after)}).dropna()
    change = (means["after"] - means["before"]).sort_values(kind="stable")
    lost, gained = change[change < 0], change[change > 0]
    shown = [str(name) for name in lost.index[:limit]]
    best, worst = _extremes(before, shown, highest=True), _extremes(after, shown, highest=False)
    fallen = [
        Fallen(name, float(means["before"][name]), float(means["after"][name]), best.get(name), worst.get(name))
        for name in shown
    ]
    return Comparison(before, after, _figures(before, after), len(means), len(lost), len(gained), fallen)


def _by_prompt(run: RunFolder, samples: Samples) -> pd.Series[float]:
    """Return what each prompt earned on the mean; where the experience is gone, by the memory of the sampler."""
    if samples.is_table and run.prompt_rewards.is_file():
        lines = map(json.loads, run.prompt_rewards.read_text(encoding="utf-8").splitlines())
        rollouts: Rollouts = next((line["rollouts"] for line in lines if line["iteration"] == samples.iteration), [])
        drawn = pd.DataFrame([pair for rollout in rollouts for pair in rollout], columns=["prompt_id", "reward"])
        return drawn.groupby("prompt_id")["reward"].mean()
    return _rewards(samples).groupby("prompt_id")["reward"].mean()


def _extremes(samples: Samples, prompts: list[str], *, highest: bool) -> dict[str, Response]:
    """Return the response of each prompt that earned most, or least."""
    rewards = _rewards(samples)
    by_prompt = rewards[rewards["prompt_id"].isin(prompts)].groupby("prompt_id")["reward"]
    rows = (by_prompt.idxmax() if highest else by_prompt.idxmin()).to_dict()
    return dict(zip(map(str, rows), samples.at([int(row) for row in rows.values()]), strict=True))


def _rewards(samples: Samples) -> pd.DataFrame:
    return pd.DataFrame({"prompt_id": samples.prompt_ids(), "reward": samples.values("reward")})


def _figures(before: Samples, after: Samples) -> list[Figure]:
    names = ["reward", *(name for name in dict.fromkeys([*before.sortable, *after.sortable]) if name.startswith(PART))]
    names += [name for name in ("truncated", LENGTH) if name in (*before.sortable, *after.sortable)]
    return [Figure(_label(name), _mean(before, name), _mean(after, name)) for name in names]


def _label(name: str) -> str:
    return {"truncated": "share that was cut", LENGTH: "tokens"}.get(name, name)


def _mean(samples: Samples, name: str) -> float | None:
    if name not in samples.sortable:
        return None
    values = samples.values(name)
    return float(np.nanmean(values)) if not np.isnan(values).all() else None
