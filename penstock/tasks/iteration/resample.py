"""Resample: groups that are refused, above all those of equal rewards, make room for answers to further prompts.

Dynamic sampling of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 11). penstock/session/rollout/refused_groups.py
decides which groups are refused. The batch is full after every rollout: where the further prompts are not
enough, refused groups stay, with advantage 0. Which prompts are drawn follows from the cursor and the rewards alone, so
a resumed run draws the same. Where a rollout ends before its longest responses, groups that are under way anyway may
come first.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.session.rollout.draw import remember
from penstock.session.rollout.episodes import PART
from penstock.session.rollout.refused_groups import judged_columns, refused_groups
from penstock.session.rollout.rounds import waiting_figures
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings
from penstock.state.columns import Columns, groups_taken, joined
from penstock.state.experience import RESAMPLED, column_names, origin_of, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.reward import punished, reward_columns, score
from penstock.tasks.iteration.rollout import UNUSED, further_rollout, waiting_after


@task(task_run_name="resample-{settings.iteration:06d}-{number}", cache_policy=NO_CACHE)
def resample(training: Training, settings: Settings, progress: Progress, stage: Stage, number: int) -> Stage:
    """Answer and score further prompts, and let those that are not refused take the place of groups that are.

    Args:
        number: of the rollout within the iteration; the first one is 0.
    """
    metrics, path = dict(stage.metrics), Path(stage.experience.path)
    training.session().say("resample")
    with timed(training, metrics, "resample"):
        present = read_columns(path, column_names(path))
        present.setdefault(RESAMPLED, np.zeros(len(present["group"]), np.int64))
        refused_G = refused_groups(training, present)
        missing, cursor = int(refused_G.sum()), progress.prompt_cursor + stage.experience.prompts
        more = prompts_to_draw(missing, training.config.rollout.prompts)
        answered = further_rollout(training, settings, stage.experience, cursor, missing, more, number)
        before = origin_of(path)
        further, unused = answered.columns, before.get(UNUSED, 0) + answered.unused_tokens
        origin = before | answered.origin | ({UNUSED: unused} if UNUSED in before else {})
        further["response"] = further["response"].to_pylist()
        scores = score(training, further, "train", f"{settings.iteration}/resample-{number}-score")
        further |= reward_columns(punished(training.config, scores, further["response_tokens"].lengths_B))
        remember(training, settings.iteration, number, further["prompt_id"], further["reward"])
        further[RESAMPLED] = np.full(len(further["group"]), number)
        refused_G = np.concatenate([refused_G, refused_groups(training, further)])
        merged = replaced(present, further, refused_G, training.config.rollout.samples)
        write_columns(path, merged, origin)
    experience = dataclasses.replace(
        stage.experience,
        prompt_tokens=int(merged["prompt_tokens"].offsets_B1[-1]),
        response_tokens=int(merged["response_tokens"].offsets_B1[-1]),
        prompts=stage.experience.prompts + answered.drawn,
        deferred=waiting_after(origin),
    )
    metrics["rollout/tokens"] += float(further["response_tokens"].offsets_B1[-1])
    metrics["rollout/prompts_drawn"] = float(experience.prompts)
    if UNUSED in origin:
        metrics |= waiting_figures(settings.iteration, experience, unused)
    return Stage(experience, metrics)


def groups_to_replace(training: Training, stage: Stage) -> int:
    """Number of groups that are refused."""
    return int(refused_groups(training, judged_columns(stage.experience.path)).sum())


def prompts_to_draw(missing: int, full: int) -> int:
    """Return how many prompts should fill the gaps if as many of their groups are refused; at most a whole batch."""
    useful = full - missing
    return min(full, math.ceil(missing * full / useful)) if useful else full


def replaced(present: Columns, further: Columns, refused_G: np.ndarray, samples: int) -> Columns:
    """Return a batch as large as `present`, of groups of both: first those that are not refused, then refused ones.

    Groups keep the order in which they were drawn and get new numbers; rows of a group are `samples` neighbours.
    A column of the reward or of an environment's parts that one side lacks is empty there. Other columns that `further`
    lacks were added by later tasks of an earlier attempt of this iteration: they are dropped.

    Args:
        refused_G: of the groups of `present`, then of `further`.
    """
    names = [name for name in present | further if name in further or name.startswith(("reward", PART))]
    both = joined([present, further], names)
    size = len(present["group"]) // samples
    kept_G = np.sort(np.argsort(refused_G, kind="stable")[:size])
    return groups_taken(both, kept_G, samples)
