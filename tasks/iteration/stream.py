"""Stream: the actor's gradient is summed portion by portion while the rest is generated (`rollout.stream`).

`portion` waits for groups and makes experience of them, a file of their own; reward, forward passes and advantage work
on it as on any. `sum_gradient` adds its gradient. `join` makes the iteration's experience of all portions, which the
update then takes its one step on. The experience says which groups made which portion: whoever does the update again
adds in the same order. Left out: which groups these are (penstock/session/rollout/portions.py), the step (update.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.commands.update import SumGradient
from penstock.session.requests import BegunRollout, Rollout
from penstock.session.rollout.episodes import episode_column_names
from penstock.session.rollout.generation import take_responses
from penstock.session.rollout.portions import StreamedRollout
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings
from penstock.state.columns import Columns, joined, taken
from penstock.state.experience import (
    AGENT,
    column_names,
    drop_experience,
    origin_of,
    read_columns,
    write_columns_apart,
)
from tasks.iteration.advantage import advantage_figures
from tasks.iteration.reward import AHEAD_SHARE, judge, reward_figures
from tasks.iteration.rollout import ROLLOUT_LOGPROBS, describe, experience_columns, length_figures, sampled_with
from tasks.iteration.update import actor_loss, split

PORTIONS = "portions"  # in the origin of experience: the groups of each
ROLLED_OUT = (
    *("sample_id", "prompt_id", "group", "prompt", "response", "prompt_tokens", "response_tokens", "loss_mask"),
    *("truncated", "policy_version", AGENT, ROLLOUT_LOGPROBS),
)


@task(task_run_name="portion-{settings.iteration:06d}-{number}", cache_policy=NO_CACHE)
def portion(training: Training, settings: Settings, begun: Rollout, number: int) -> Stage:
    """Wait until a portion of a rollout has all its responses, and make experience of it."""
    session, path = training.session(), portion_path(training, begun.iteration, number)
    streamed, metrics = session.rollouts[begun.key], dict[str, float]()
    assert isinstance(streamed, StreamedRollout)
    began = time.perf_counter()
    session.say("rollout", f"portion {number + 1} of {streamed.portions.count}")
    if streamed.generation is None:
        columns, groups = _left_behind(training.run.experience(begun.iteration), number)
    else:
        groups = streamed.portions.wait(number, streamed.generation.replies)
        responses = streamed.portions.responses(groups)
        columns = experience_columns(training, settings, streamed.prompts, responses)
    metrics["rollout/portion_wait_s"] = time.perf_counter() - began
    write_columns_apart(path, columns, {PORTIONS: [groups]})
    return Stage(replace(describe(path, columns, 0, {}), portion=number), metrics)


@task(task_run_name="sum-gradient-{settings.iteration:06d}-{number}", cache_policy=NO_CACHE)
def sum_gradient(training: Training, settings: Settings, stage: Stage, number: int) -> Stage:
    """Add the gradient of a portion to the actor's."""
    return sum_of_groups(training, settings, stage, number, None)


def sum_of_groups(training: Training, settings: Settings, stage: Stage, number: int, groups: list[int] | None) -> Stage:
    """Add the gradient of some groups to the actor's, as portion `number`; None: of all in the experience."""
    stream, metrics = training.config.rollout.stream, dict(stage.metrics)
    assert stream is not None
    command = SumGradient(
        path=stage.experience.path,
        version=stage.experience.policy_version,
        split=split(training, settings.iteration, settings.micro_batch_tokens),
        loss=actor_loss(training.config.algorithm, settings),
        first=number == 0,
        last=number == stream.portions - 1,
        groups=groups,
    )
    training.session().say("update", f"portion {number + 1} of {stream.portions}")
    with timed(training, metrics, "update_actor"):
        training.session().call("actor", command, f"{settings.iteration}/update_actor/{number}")
    return Stage(stage.experience, metrics)


def sum_again(training: Training, settings: Settings, stage: Stage) -> None:
    """Sum the gradient of an iteration's experience anew, in the portions in which it was summed."""
    for number, groups in enumerate(origin_of(stage.experience.path)[PORTIONS]):
        sum_of_groups(training, settings, stage, number, groups)


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


def portion_path(training: Training, iteration: int, number: int) -> Path:
    """Return where a portion's experience lies until all are joined."""
    whole = training.run.experience(iteration)
    return whole.with_name(f".{whole.stem}.portion-{number}{whole.suffix}")


def _left_behind(path: Path, number: int) -> tuple[Columns, list[int]]:
    """Return the rollout's columns of a portion of experience that an interrupted attempt has left, and its groups."""
    groups: list[int] = origin_of(path)[PORTIONS][number]
    present = column_names(path)
    columns = read_columns(path, [*(name for name in ROLLED_OUT if name in present), *episode_column_names(path)])
    samples = int((columns["group"] == 0).sum())
    rows_B = (np.asarray(groups)[:, None] * samples + np.arange(samples)).ravel()
    return taken(columns, rows_B) | {"group": np.repeat(np.arange(len(groups)), samples)}, groups


def _in_order(parts: Sequence[Columns], groups: Sequence[Sequence[int]], samples: int) -> Columns:
    """Return the columns of all portions as one, group by group as the engines got them."""
    names = dict.fromkeys(name for part in parts for name in part)
    first_G = np.argsort(np.concatenate([np.asarray(some) for some in groups]))
    rows_B = (first_G[:, None] * samples + np.arange(samples)).ravel()
    columns = taken(joined(parts, names), rows_B)
    return columns | {"group": np.repeat(np.arange(len(first_G)), samples)}


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
