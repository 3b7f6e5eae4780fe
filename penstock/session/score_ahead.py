"""Rewards of responses that have ended, while others are still generated; used by rollout. Not a task itself.

The engines tell of such responses (engines/rollout/announcing.py), and where several engines work, the reply of the
first is there before the last has ended. What comes of it is taken by the reward task (penstock/rewards/ahead.py).

Left out: rewards that the engines compute themselves, a reward model's and an environment's. And the user's function
where the engines are on the CPU: it would take the cores that they generate with (quickstart on two cores: rollouts
took 0.1 s longer, rewards 0.03 s less).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from penstock.rewards.types import Sample
from penstock.session.session import Training, prompt_columns

News = Callable[[dict[str, Any]], None]


def sample_id(iteration: int, prompt_id: str, number: int) -> str:
    """Return the name of a prompt's response."""
    return f"{iteration:06d}/{prompt_id}/{number}"


def scoring_ahead(training: Training, iteration: int, prompts: pd.DataFrame) -> News | None:
    """Return what takes the engines' news of a rollout of `prompts`; None where no response is scored by itself."""
    session, config = training.session(), training.config
    scorer, samples = session.scorer, config.rollout.samples
    if scorer is None or config.environment is not None:
        return None
    if config.reward.function is not None and session.groups["rollout"].spec.devices[0].gpu is None:
        return None
    ids, asked = [str(name) for name in prompts["prompt_id"]], list(prompts["prompt_text"])
    told: set[tuple[int, int]] = set()  # a reply holds also what its engine told before

    def begin(news: dict[str, Any]) -> None:
        if not news:
            return  # of a rank that leaves the reply to the first of its engine
        rows = prompt_columns(training, "train")
        texts = dict(zip(zip(*places(news, samples), strict=True), news["texts"].to_pylist(), strict=True))
        new = [place for place in texts if place not in told]
        told.update(new)
        scorer.begin(
            [
                Sample(sample_id(iteration, ids[at], number), ids[at], asked[at], texts[at, number], rows[ids[at]])
                for at, number in new
            ]
        )

    return begin


def places(news: dict[str, Any], samples: int) -> tuple[list[int], list[int]]:
    """Return of each response its prompt's position and its number; a reply has `samples` per position, in order."""
    positions = np.asarray(news["positions"])
    if "samples" in news:
        return positions.tolist(), np.asarray(news["samples"]).tolist()
    return np.repeat(positions, samples).tolist(), np.tile(np.arange(samples), len(positions)).tolist()
