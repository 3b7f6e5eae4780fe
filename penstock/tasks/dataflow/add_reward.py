"""A further part of the reward: from a function that runs as the recipe's does, or from numbers that are there.

The part is a column `reward/<name>` beside those of the recipe's reward, to which it is added with a weight. Left out:
groups that were refused for their rewards, the greedy baseline, and samplers of prompts: they know the recipe's reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.base.bounds import LARGEST_REWARD
from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import check_failures, log_failures
from penstock.rewards.source import Scorer, check_source, open_scorer
from penstock.session.rollout.refused_groups import PART
from penstock.session.session import Stage, Training, may_help_again, timed
from penstock.session.settings import Settings
from penstock.state.experience import add_columns, column_names, read_columns
from penstock.tasks.iteration.reward import reward_figures, samples_of


@task(
    task_run_name="score-{name}-{settings.iteration:06d}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_condition_fn=may_help_again,
)
def score(
    training: Training, settings: Settings, stage: Stage, name: str, function: str, values: Mapping[str, Any]
) -> Stage:
    """Score the responses by a user's function, into the column of the part `name`.

    Args:
        function: `module:function`, with the arguments of `reward.function`.
        values: its settings.

    Raises:
        UserError: it does not load, or more calls failed than `reward.max_failure_share` allows.
    """
    metrics, path = dict(stage.metrics), Path(stage.experience.path)
    training.session().say("reward", name)
    with timed(training, metrics, "reward"):
        columns = read_columns(path, ["sample_id", "prompt_id", "prompt", "response"])
        samples = samples_of(training, columns, "train")
        scores = _scorer(training, name, function, values).score(samples)
        check_failures(scores, samples, training.config.reward)
        log_failures(scores, samples)
        add_columns(path, {PART + name: np.asarray([item.reward for item in scores], np.float64)})
    return Stage(stage.experience, metrics)


def _scorer(training: Training, name: str, function: str, values: Mapping[str, Any]) -> Scorer:
    """Return what calls a function, with the workers, deadline and sandbox of the recipe's; opened on its first use."""
    session, recipe = training.session(), training.config.reward
    if name not in session.more_scorers:
        own = recipe if recipe.function is not None else RewardConfig()
        config = RewardConfig(
            function=function,
            settings=dict(values),
            timeout_s=own.timeout_s,
            workers=own.workers,
            sandbox=own.sandbox,
            failure_value=recipe.failure_value,
            max_failure_share=recipe.max_failure_share,
        )
        columns = session.prompts["train"].columns
        check_source(config, columns)
        log = training.run.logs / f"reward-{name}.log"
        session.more_scorers[name] = session.stack.enter_context(open_scorer(config, columns, log))
    return session.more_scorers[name]


def add_reward(stage: Stage, name: str, weight: float, scores_B: Any = None) -> Stage:
    """Add a part to the reward; return the stage with the figures of the reward as it is then.

    Args:
        weight: what the reward gains is the part times this.
        scores_B: the part, a number for each response; None: its column is there.

    Raises:
        UserError: the numbers are not one for each response, or none that can be a reward.
    """
    path = Path(stage.experience.path)
    names = [column for column in column_names(path) if column == "reward" or column.startswith(PART)]
    columns = read_columns(path, ["reward_failure", *names])
    if scores_B is not None:
        columns[PART + name] = checked(name, scores_B, len(columns["reward"]))
    columns["reward"] = columns["reward"] + weight * columns[PART + name]
    checked(name, columns["reward"], len(columns["reward"]))
    add_columns(path, {column: columns[column] for column in ("reward", PART + name)})
    return Stage(stage.experience, stage.metrics | reward_figures(columns))


def checked(name: str, scores_B: Any, count: int) -> np.ndarray:
    """Return scores as an array, float64.

    Raises:
        UserError: they are not one number for each of `count` responses, or not within what a reward may be.
    """
    try:
        found_B = np.asarray(scores_B, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"the scores of '{name}' are no numbers: {error}", "give one number per response") from None
    if found_B.shape != (count,):
        said = f"the scores of '{name}' have the shape {found_B.shape}, and there are {count} responses"
        raise UserError(said, "give one number per response, in the order of step.read")
    if (wrong := np.flatnonzero(~(np.abs(found_B) <= LARGEST_REWARD))).size:
        raise UserError(
            f"{wrong.size} of {count} scores of '{name}' can be no reward; the first is {found_B[wrong[0]]}",
            f"give numbers within +-{LARGEST_REWARD:g}",
        )
    return found_B
