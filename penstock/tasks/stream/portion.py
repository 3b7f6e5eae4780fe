"""Portion: wait for groups of a rollout that have all their responses, and make experience of them (`rollout.stream`).

It lies in a file of its own, on which reward, forward passes and advantage work as on any. Left out: which groups these
are (penstock/session/rollout/portions.py).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.session.requests import Rollout
from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.session.rollout.episodes import episode_column_names
from penstock.session.rollout.portions import StreamedRollout
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.state.columns import Columns, groups_taken
from penstock.state.experience import AGENT, column_names, origin_of, read_columns, write_columns_apart
from penstock.tasks.iteration.rollout import ROLLOUT_LOGPROBS, describe, experience_columns

PORTIONS = "portions"  # in the origin of experience: the groups of each
ROLLED_OUT = (
    *("sample_id", "prompt_id", "group", "prompt", "response", "prompt_tokens", "response_tokens", "loss_mask"),
    *("truncated", "policy_version", AGENT, ROLLOUT_LOGPROBS, POLICY_VERSIONS),
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
        path_of_all, samples = training.run.experience(begun.iteration), training.config.rollout.samples
        columns, groups = _left_behind(path_of_all, number, samples)
    else:
        groups = streamed.portions.wait(number, streamed.generation.replies)
        responses = streamed.portions.responses(groups)
        columns = experience_columns(training, settings, streamed.prompts, responses)
    metrics["rollout/portion_wait_s"] = time.perf_counter() - began
    write_columns_apart(path, columns, {PORTIONS: [groups]})
    return Stage(replace(describe(path, columns, 0, {}), portion=number), metrics)


def portion_path(training: Training, iteration: int, number: int) -> Path:
    """Return where a portion's experience lies until all are joined."""
    whole = training.run.experience(iteration)
    return whole.with_name(f".{whole.stem}.portion-{number}{whole.suffix}")


def _left_behind(path: Path, number: int, samples: int) -> tuple[Columns, list[int]]:
    """Return the rollout's columns of a portion of experience that an interrupted attempt has left, and its groups."""
    groups: list[int] = origin_of(path)[PORTIONS][number]
    present = column_names(path)
    columns = read_columns(path, [*(name for name in ROLLED_OUT if name in present), *episode_column_names(path)])
    return groups_taken(columns, np.asarray(groups), samples), groups
