"""Join: the portions of a rollout become the iteration's experience, and their figures the iteration's.

Its origin says which groups made which portion. How many rewards failed is judged now, over the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.session.requests import BegunRollout, Rollout
from penstock.session.rollout.generation import take_responses
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.state.columns import Columns, groups_taken, joined
from penstock.state.experience import column_names, drop_experience, origin_of, read_columns, write_columns_apart
from penstock.tasks.iteration.advantage import advantage_figures
from penstock.tasks.iteration.reward import AHEAD_SHARE, judge, reward_figures
from penstock.tasks.iteration.rollout import describe, length_figures, sampled_with
from penstock.tasks.stream.portion import PORTIONS


@task(task_run_name="join-{settings.iteration:06d}", cache_policy=NO_CACHE)
def join(training: Training, settings: Settings, begun: Rollout, stages: Sequence[Stage]) -> Stage:
    """Make the iteration's experience of its portions, and its figures of theirs."""
    path, rollout = training.run.experience(begun.iteration), training.session().rollouts.pop(begun.key)
    paths = [Path(stage.experience.path) for stage in stages]
    groups = [origin_of(one)[PORTIONS][0] for one in paths]
    parts = [read_columns(one, column_names(one)) for one in paths]
    columns = _in_order(parts, groups, training.config.rollout.samples)
    write_columns_apart(path, columns, sampled_with(training, settings, rollout.round) | {PORTIONS: groups})
    judge(training, columns)
    for one in paths:
        drop_experience(one)
    training.run.ended(begun.iteration).unlink(missing_ok=True)
    experience = describe(path, columns, rollout.round.drawn, {})
    metrics = _summed([stage.metrics for stage in stages]) | _ahead_share(stages)
    metrics |= _generation_figures(training, rollout, experience.response_tokens)
    metrics |= length_figures(training, begun.key, columns) | reward_figures(columns)
    return Stage(experience, metrics | advantage_figures(training, settings, path))


def _in_order(parts: Sequence[Columns], groups: Sequence[Sequence[int]], samples: int) -> Columns:
    """Return the columns of all portions as one, group by group as the engines got them."""
    names = dict.fromkeys(name for part in parts for name in part)
    first_G = np.argsort(np.concatenate([np.asarray(some) for some in groups]))
    return groups_taken(joined(parts, names), first_G, samples)


def _summed(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add up the seconds of all portions."""
    names = dict.fromkeys(name for one in metrics for name in one if name.startswith(("time/", "rollout/portion_")))
    return {name: sum(one.get(name, 0.0) for one in metrics) for name in names}


def _ahead_share(stages: Sequence[Stage]) -> dict[str, float]:
    """Return the share of the samples of all portions whose reward was begun ahead, where rewards are."""
    shares = [(stage.metrics.get(AHEAD_SHARE), stage.experience.samples) for stage in stages]
    known = [(share, samples) for share, samples in shares if share is not None]
    weights = [samples for _, samples in known]
    return {AHEAD_SHARE: float(np.average([share for share, _ in known], weights=weights))} if known else {}


def _generation_figures(training: Training, rollout: BegunRollout, tokens: int) -> dict[str, float]:
    """Return the engines' figures, and for how long the actor's work outlasted theirs; nothing of one taken over."""
    if rollout.generation is None:
        return {}
    replies = rollout.generation.replies.result()
    seconds = replies.ended - replies.began
    training.session().clock.ran("rollout", replies.began, replies.ended)
    figures: dict[str, Any] = take_responses(training, rollout.generation, replies.began).metrics
    return figures | {
        "time/rollout_s": seconds,
        "rollout/tokens_per_s": tokens / seconds,
        "rollout/portion_after_s": time.perf_counter() - replies.ended,
    }
