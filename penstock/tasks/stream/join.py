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
from penstock.session.rollout.carried import CARRIED
from penstock.session.rollout.generation import take_responses
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.state.columns import Columns, groups_taken, joined
from penstock.state.experience import column_names, drop_experience, origin_of, read_columns, write_columns_apart
from penstock.tasks.iteration.advantage import advantage_figures
from penstock.tasks.iteration.reward import AHEAD_SHARE, judge, reward_figures
from penstock.tasks.iteration.rollout import (
    ANSWERED,
    UNUSED,
    WAITING,
    describe,
    experience_figures,
    sampled_with,
    what_is_left,
)
from penstock.tasks.stream.portion import PORTIONS


@task(task_run_name="join-{settings.iteration:06d}", cache_policy=NO_CACHE)
def join(training: Training, settings: Settings, begun: Rollout, stages: Sequence[Stage]) -> Stage:
    """Make the iteration's experience of its portions, and its figures of theirs."""
    path, rollout = training.run.experience(begun.iteration), training.session().rollouts.pop(begun.key)
    paths = [Path(stage.experience.path) for stage in stages]
    groups = [origin_of(one)[PORTIONS][0] for one in paths]
    parts = [read_columns(one, column_names(one)) for one in paths]
    columns = in_order(parts, groups, training.config.rollout.samples)
    metrics = _summed([stage.metrics for stage in stages]) | _ahead_share(stages)
    left, figures = _left(training, begun, rollout, int(columns["response_tokens"].offsets_B1[-1]))
    origin = sampled_with(training, settings, rollout.round) | left
    write_columns_apart(path, columns, origin | {PORTIONS: _numbered(groups)})
    judge(training, columns)
    for one in paths:
        drop_experience(one)
    training.run.ended(begun.iteration).unlink(missing_ok=True)
    experience = describe(path, columns, rollout.round.drawn, origin)
    metrics |= figures | experience_figures(training, begun, rollout.round, experience, columns, origin)
    metrics |= reward_figures(columns)
    return Stage(experience, metrics | advantage_figures(training, settings, path))


def in_order(parts: Sequence[Columns], groups: Sequence[Sequence[int]], samples: int) -> Columns:
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


def _numbered(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups of each portion by their numbers among those that make the batch."""
    number = {group: place for place, group in enumerate(sorted(group for some in groups for group in some))}
    return [[number[group] for group in some] for some in groups]


def _left(
    training: Training, begun: Rollout, rollout: BegunRollout, tokens: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what the rollout has left for later, and the engines' figures; of one taken over what its file says.

    Args:
        tokens: of the responses.
    """
    if rollout.generation is None:
        origin = origin_of(training.run.experience(begun.iteration))
        return {name: origin[name] for name in (ANSWERED, WAITING, UNUSED, CARRIED) if name in origin}, {}
    replies = rollout.generation.replies.result()
    seconds = replies.ended - replies.began
    training.session().clock.ran("rollout", replies.began, replies.ended)
    responses = take_responses(training, rollout.generation, replies.began)
    return what_is_left(training, begun.iteration, rollout.round, responses), responses.metrics | {
        "time/rollout_s": seconds,
        "rollout/tokens_per_s": tokens / seconds,
        "rollout/portion_after_s": time.perf_counter() - replies.ended,
    }
