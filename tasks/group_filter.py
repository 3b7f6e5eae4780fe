"""Group filter: which groups of responses dynamic sampling refuses, by what they earned.

A refused group makes room for another (tasks/refill.py); where it has to stay, nothing is learnt from it
(tasks/advantage.py). A user's function `module:function` gets for each group what its parameter names ask for, and
returns whether to keep it:

- `rewards`: of its responses, a float64 array; `parts`: the same of each part of the reward, by name;
- `responses`: their texts; `prompt`, `prompt_id`; `row`: all columns of the data row, a dict.

It must depend on these alone, so that a resumed run draws the same prompts. Left out: replacing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.calls import wanted
from configs.errors import UserError
from configs.imports import import_named
from configs.sampling import DynamicSamplingConfig
from state.experience import column_names, read_columns

if TYPE_CHECKING:
    from tasks.session import Training

SETTING = "algorithm.dynamic_sampling.function"
PART = "reward/"  # columns of the parts of a reward
ARGUMENTS = ("rewards", "parts", "responses", "prompt", "prompt_id", "row")


@dataclass(frozen=True)
class GroupFilter:
    """A user's function with its settings bound, and the arguments that it asks for."""

    spec: str
    callable: Callable[..., Any]
    wants: tuple[str, ...]

    def keeps(self, arguments: dict[str, Any]) -> bool:
        """Ask the function about one group.

        Raises:
            UserError: it raised, or returned neither true nor false.
        """
        try:
            answer = self.callable(**{name: arguments[name] for name in self.wants})
        except Exception as error:
            raise UserError(
                f"{SETTING} '{self.spec}' failed for prompt {arguments['prompt_id']}: {type(error).__name__}: {error}",
                "correct the function",
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise UserError(f"{SETTING} '{self.spec}' returned {answer!r}", "return true to keep the group, or false")
        return bool(answer)


def load_filter(config: DynamicSamplingConfig) -> GroupFilter | None:
    """Return the user's function, None without one.

    Raises:
        UserError: it cannot be imported, or asks for what is not there.
    """
    if config.function is None:
        return None
    function, settings = import_named(SETTING, config.function, "function", "my_filters:keep"), config.settings or {}
    parameters = inspect.signature(function).parameters
    wants = wanted(SETTING, config.function, parameters, settings, ARGUMENTS, "an argument of filters")
    return GroupFilter(config.function, functools.partial(function, **settings), wants)


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
    from tasks.reward import prompt_columns  # here, because a session starts with checks that load the filter

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
