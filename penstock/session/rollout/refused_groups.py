"""Group filter: which groups of responses dynamic sampling refuses, by what they earned.

A refused group makes room for another (penstock/tasks/iteration/resample.py); where it has to stay, nothing is learnt
from it (penstock/tasks/iteration/advantage.py). A user's function `module:function` gets for each group what its
parameter names ask for, and returns whether to keep it:

- `rewards`: of its responses, a float64 array; `parts`: the same of each part of the reward, by name;
- `responses`: their texts; `prompt`, `prompt_id`; `row`: all columns of the data row, a dict.

It must depend on these alone, so that a resumed run draws the same prompts. Left out: replacing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.group_filters import load_filter
from penstock.session.session import Training, prompt_columns
from penstock.state.experience import column_names, read_columns

PART = "reward/"  # columns of the parts of a reward


def judged_columns(path: str | Path) -> dict[str, Any]:
    """Read what groups of an experience file are judged by."""
    parts = [name for name in column_names(path) if name.startswith(PART)]
    return read_columns(path, ["reward", "prompt", "prompt_id", "response", *parts])


def refused_groups(training: Training, columns: dict[str, Any]) -> np.ndarray:
    """Whether dynamic sampling refuses a group, per group in file order; none without dynamic sampling.

    Args:
        columns: those of `judged_columns`; the responses to a prompt are neighbours.
    """
    config, samples = training.config.algorithm.dynamic_sampling, training.config.rollout.samples
    rewards_GS = np.asarray(columns["reward"], np.float64).reshape(-1, samples)
    refused_G = np.zeros(len(rewards_GS), bool)
    if config is None:
        return refused_G
    if config.equal_rewards:
        refused_G |= (rewards_GS == rewards_GS[:, :1]).all(axis=1)
    if config.mean_reward is not None:
        mean_G, (low, high) = rewards_GS.mean(axis=1), config.mean_reward
        refused_G |= (mean_G < low) | (mean_G > high)
    if (keep := load_filter(config)) is not None:
        for group in np.flatnonzero(~refused_G):
            refused_G[group] = not keep.keeps(_arguments(training, columns, int(group), samples))
    return refused_G


def _arguments(training: Training, columns: dict[str, Any], group: int, samples: int) -> dict[str, Any]:
    rows = slice(group * samples, (group + 1) * samples)
    prompt_id = columns["prompt_id"][rows.start]
    return {
        "rewards": np.asarray(columns["reward"][rows], np.float64),
        "parts": {name.removeprefix(PART): columns[name][rows] for name in columns if name.startswith(PART)},
        "responses": columns["response"][rows],
        "prompt": columns["prompt"][rows.start],
        "prompt_id": prompt_id,
        "row": prompt_columns(training, "train")[prompt_id],
    }
