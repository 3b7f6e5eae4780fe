"""Samplers: which prompts an iteration takes, as pure functions, so that a resumed run takes those it would have taken.

A sampler is a function that gets what its parameter names ask for and returns `count` row indices of the table:

- `table`: the training prompts, a frame with `prompt_id`, `prompt_text`, `prompt_tokens` and the data's own columns;
- `count`: prompts wanted; `cursor`: prompts taken before, those of this iteration's earlier rollouts included;
- `iteration`: from 1 on; `seed`: the run's; `samples`: responses to a prompt in a rollout;
- `history`: what earlier rollouts earned (`PromptHistory`), those of this iteration included.

A user's function `module:function` has the same parameters, and settings of its own. The functions here are those that
a name stands for. Draws are raw PCG64 streams, which NumPy promises never to change.

Left out: where the history comes from (penstock/session/rollout/draw.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.configs.sections.prompt_selection import SamplerConfig
from penstock.data.order import epoch_order, take
from penstock.data.rows import place, require_columns
from penstock.usercode.arguments import wanted
from penstock.usercode.imports import import_named

ARGUMENTS = ("table", "count", "cursor", "iteration", "seed", "samples", "history")
ADAPTIVE = 1  # tells the draws of `adaptive` from those of `epoch_order`, which come from seed and epoch alone


@dataclass(frozen=True)
class PromptHistory:
    """What the prompts drawn so far earned, one entry (V) per prompt and rollout, in the order drawn.

    Attributes:
        rows_V: row of the table, int64; a prompt that was drawn twice is there twice.
        iterations_V: when it was drawn, int64.
        rewards_V: mean reward of its responses, float64.
    """

    rows_V: np.ndarray
    iterations_V: np.ndarray
    rewards_V: np.ndarray


@dataclass(frozen=True)
class Sampler:
    """A sampler with its settings bound, and the arguments that it asks for."""

    spec: str
    callable: Callable[..., Any]
    wants: tuple[str, ...]

    @property
    def remembers(self) -> bool:
        """Whether it needs the history of prompts."""
        return "history" in self.wants

    def draw(self, arguments: Mapping[str, Any]) -> np.ndarray:
        """Return the row indices (int64, `count` of them).

        Raises:
            UserError: a user's function raised, or returned something else.
        """
        given = {name: arguments[name] for name in self.wants}
        try:
            rows = np.asarray(self.callable(**given))
        except Exception as error:
            raise UserError(
                f"data.sampler.name '{self.spec}' failed: {type(error).__name__}: {error}", "correct the function"
            ) from error
        count, size = arguments["count"], len(arguments["table"])
        if rows.shape != (count,) or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= size:
            raise UserError(
                f"data.sampler.name '{self.spec}' returned no {count} row indices from 0 to {size - 1} "
                f"(shape {rows.shape}, {rows.dtype})",
                "return as many integers as its argument `count` says",
            )
        return rows.astype(np.int64)


Drawn = tuple[np.ndarray, np.ndarray]  # rows of the table, int64, and their mean rewards, float64


@dataclass
class PromptDraws:
    """What a training has drawn of its prompts, and by which sampler.

    Attributes:
        sampler: the sampler.
        ids: prompt ids, in the order of the table.
        drawn: prompts and rewards by iteration and rollout within it (0: the first).
        repeats: whether a user's sampler was seen to give the same draw twice.
    """

    sampler: Sampler
    ids: pd.Index[str]
    drawn: dict[int, dict[int, Drawn]] = field(default_factory=dict)
    repeats: bool = False

    def history(self) -> PromptHistory:
        """Everything drawn and scored so far."""
        parts = [(iteration, *drawn) for iteration, rollouts in self.drawn.items() for drawn in rollouts.values()]
        iterations, rows, rewards = zip(*parts, strict=True) if parts else ((), (), ())
        return PromptHistory(
            np.concatenate([np.empty(0, np.int64), *rows]),
            np.repeat(np.asarray(iterations, np.int64), [len(part) for part in rows]),
            np.concatenate([np.empty(0), *rewards]),
        )


def load_sampler(config: SamplerConfig) -> Sampler:
    """Return the sampler of a configuration.

    Raises:
        UserError: a user's function cannot be imported, or asks for what is not there.
    """
    if config.name in SAMPLERS:
        function, settings = SAMPLERS[config.name], config.built_in
    else:
        function = import_named("data.sampler.name", config.name, "function", "my_samplers:by_topic")
        settings = config.settings or {}
    parameters = inspect.signature(function).parameters
    wants = wanted("data.sampler.name", config.name, parameters, settings, ARGUMENTS, "an argument of samplers")
    return Sampler(config.name, functools.partial(function, **settings), wants)


def require_numbers(frame: pd.DataFrame, column: str, source: str) -> None:
    """Check that a column orders the rows: numbers, and none missing.

    Raises:
        UserError: it does not.
    """
    require_columns(frame, [column], source)
    values = frame[column]
    if missing := np.flatnonzero(values.isna()).tolist():
        raise UserError(
            f"{place(source, missing[0])}: '{column}' is null", "give every row a number, or remove the row"
        )
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        raise UserError(
            f"{source}: the sampler's column '{column}' holds no numbers, so it says not what is easy",
            "name a column of numbers, or write the order as numbers",
        )


def shuffled(*, table: pd.DataFrame, count: int, cursor: int, seed: int) -> np.ndarray:
    """Every prompt once per epoch, in a new order in every epoch."""
    return take(cursor, count, len(table), seed, shuffle=True)


def sequential(*, table: pd.DataFrame, count: int, cursor: int) -> np.ndarray:
    """Every prompt once per epoch, in the order of the file."""
    return take(cursor, count, len(table), seed=0, shuffle=False)


def curriculum(*, table: pd.DataFrame, count: int, cursor: int, seed: int, column: str, descending: bool) -> np.ndarray:
    """Every prompt once per epoch, by ascending numbers of a column; equal numbers in a new order in every epoch.

    Bengio et al. 2009, "Curriculum learning".

    Args:
        column: says how hard a prompt is.
        descending: the largest numbers are the easiest.
    """
    hardness = table[column].to_numpy(np.float64) * (-1.0 if descending else 1.0)
    size, rows = len(table), []
    for epoch in range(cursor // size, (cursor + count - 1) // size + 1):
        order = epoch_order(size, seed, epoch, shuffle=True)
        rows.append(order[np.argsort(hardness[order], kind="stable")])
    start = cursor % size
    return np.concatenate(rows)[start : start + count]


# A sampler names each argument that it wants, and its settings are keys of `data.sampler`: nothing to be grouped here.
def adaptive(
    *,
    table: pd.DataFrame,
    count: int,
    cursor: int,
    iteration: int,
    seed: int,
    samples: int,
    history: PromptHistory,
    half_life: float,
    reward_range: tuple[float, float],
) -> np.ndarray:
    """Prompts at random, each weighing what a response to it is expected to teach: E[p (1 - p)], p its success rate.

    p (1 - p) is the variance of a reward of success or failure, largest at one half (Foster et al. 2025, arXiv
    2502.12272). The belief about p is a Beta distribution: Beta(1, 1), updated by the successes and failures seen,
    where a mean reward counts as that share of successes. Older rewards count less, since the policy learns (Qu et al.
    2025, arXiv 2507.04632). An unseen prompt has weight 1/6. An iteration takes no prompt twice as long as there are
    others.

    Args:
        half_life: iterations after which a reward counts half.
        reward_range: mean rewards of failure and of success; what is beyond counts as these.
    """
    low, high = reward_range
    faded_V = samples * 0.5 ** ((iteration - history.iterations_V) / half_life)
    share_V = np.clip((history.rewards_V - low) / (high - low), 0.0, 1.0)
    size = len(table)
    successes = 1.0 + np.bincount(history.rows_V, weights=faded_V * share_V, minlength=size)
    failures = 1.0 + np.bincount(history.rows_V, weights=faded_V * (1.0 - share_V), minlength=size)
    seen = successes + failures
    weights = successes * failures / (seen * (seen + 1.0))
    # The smallest of exponential variables with these rates: weighted sampling without replacement (Efraimidis and
    # Spirakis 2006). Prompts of this iteration come last.
    draws = np.random.PCG64(np.random.SeedSequence([seed, cursor, ADAPTIVE])).random_raw(size)
    waiting = -np.log1p(-((draws >> np.uint64(11)) * 2.0**-53)) / weights
    taken = np.bincount(history.rows_V[history.iterations_V == iteration], minlength=size)
    order = np.lexsort((waiting, taken))
    return np.resize(order, count)


SAMPLERS: dict[str, Callable[..., np.ndarray]] = {
    function.__name__: function for function in (shuffled, sequential, curriculum, adaptive)
}
