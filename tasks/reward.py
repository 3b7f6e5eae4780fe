"""Reward: every response gets its worth, from the user's function or from a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from algorithms.overlong import overlong_penalty
from configs.schema import TrainConfig
from data.prompts import RESERVED
from rewards.scoring import Sample, Score, check_failures, log_failures
from state.experience import add_columns, read_columns
from tasks.session import Stage, Training, may_help_again, timed
from tasks.settings import Settings

OVERLONG = "overlong"  # the part that `reward.overlong` adds


@task(
    task_run_name="reward-{settings.iteration:06d}", cache_policy=NO_CACHE, retries=1, retry_condition_fn=may_help_again
)
def reward(training: Training, settings: Settings, stage: Stage) -> Stage:
    """Score the experience and add columns `reward`, `reward/<part>` and `reward_failure`."""
    metrics = dict(stage.metrics)
    path = Path(stage.experience.path)
    with timed(metrics, "reward"):
        columns = read_columns(path, ["sample_id", "prompt_id", "prompt", "response", "response_tokens"])
        scores = score(training, columns, "train", f"{settings.iteration}/reward")
        scores = punished(training.config, scores, columns["response_tokens"].lengths_B)
        add_columns(path, reward_columns(scores))
    return Stage(stage.experience, metrics | reward_metrics(scores))


def score(training: Training, columns: dict[str, Any], split: str, key: str) -> list[Score]:
    """Score responses by the configured function or model.

    Args:
        columns: sample_id, prompt_id, prompt and response, one entry per row.
        split: prompt table that the prompts come from; functions see its columns.

    Raises:
        UserError: more calls failed than `reward.max_failure_share` allows.
    """
    if training.config.reward.model is not None:
        return _score_by_model(training, columns, key)
    pool = training.session().reward_pool
    assert pool is not None
    rows = prompt_columns(training, split)
    samples = [
        Sample(sample_id, prompt_id, prompt, response, rows[prompt_id])
        for sample_id, prompt_id, prompt, response in zip(
            columns["sample_id"], columns["prompt_id"], columns["prompt"], columns["response"], strict=True
        )
    ]
    scores = pool.score(samples)
    log_failures(scores, samples)
    check_failures(scores, samples, training.config.reward)
    return scores


def punished(config: TrainConfig, scores: list[Score], lengths_B: np.ndarray) -> list[Score]:
    """Add the part `overlong` to the rewards of training, if it is configured; a failed reward stays what it is."""
    if (overlong := config.reward.overlong) is None:
        return scores
    limit = config.rollout.max_response_tokens
    penalties_B = overlong_penalty(
        lengths_B, max_tokens=limit, buffer_tokens=overlong.buffer_tokens, penalty=overlong.penalty
    )
    return [
        item if item.failure else Score(item.reward + penalty, {**item.parts, OVERLONG: penalty}, None)
        for item, penalty in zip(scores, penalties_B.tolist(), strict=True)
    ]


def prompt_columns(training: Training, split: str) -> dict[str, dict[str, Any]]:
    """Return the data columns of every prompt of a split by prompt id; made once per training."""
    cache = training.session().prompt_columns
    if split not in cache:
        frame = training.session().prompts[split].frame
        records = frame.drop(columns=[name for name in RESERVED if name != "prompt_id"]).to_dict("records")
        cache[split] = {str(record.pop("prompt_id")): record for record in records}  # type: ignore[misc]
    return cache[split]


def _score_by_model(training: Training, columns: dict[str, list[str]], key: str) -> list[Score]:
    session = training.session()
    texts = [prompt + response for prompt, response in zip(columns["prompt"], columns["response"], strict=True)]
    shares = np.array_split(np.arange(len(texts)), len(session.groups["reward"].spec.devices))
    per_rank = [{"texts": [texts[row] for row in share]} for share in shares]
    budget = training.config.data.max_prompt_tokens + training.config.rollout.max_response_tokens
    replies = session.call("reward", "score", key, per_rank=per_rank, budget=max(16384, 2 * budget))
    return [Score(float(value), {}, None) for reply in replies for value in reply["scores"]]


def reward_columns(scores: list[Score]) -> dict[str, Any]:
    """Return the experience columns of scores."""
    parts = sorted({name for score in scores for name in score.parts})
    return {
        "reward": np.asarray([score.reward for score in scores], np.float64),
        "reward_failure": [score.failure for score in scores],
        **{f"reward/{name}": np.asarray([score.parts.get(name, np.nan) for score in scores]) for name in parts},
    }


def reward_metrics(scores: list[Score]) -> dict[str, float]:
    """Return mean, spread, extremes, failures and the mean of every part."""
    rewards = np.asarray([score.reward for score in scores])
    parts = sorted({name for score in scores for name in score.parts})
    means = {
        f"reward/{name}_mean": float(np.mean([s.parts[name] for s in scores if name in s.parts])) for name in parts
    }
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/failures": float(sum(score.failure is not None for score in scores)),
        **means,
    }
