"""Reward: every response gets its worth, from the user's function, a reward model, a judge or a service."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.algorithms.overlong import overlong_penalty
from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.commands.forward import Score as ScoreTexts
from penstock.engines.sizing.memory import scored_tokens
from penstock.rewards.pool import Score, check_failures, log_failures
from penstock.rewards.types import Sample
from penstock.session.rollout.draw import remember
from penstock.session.rollout.episodes import FAILURE, check_episodes, episode_column_names, with_environment
from penstock.session.session import Stage, Training, may_help_again, prompt_columns, timed
from penstock.session.settings import Settings
from penstock.state.experience import AGENT, add_columns, read_columns
from penstock.usercode.guard import out_of_bounds

OVERLONG = "overlong"  # the part that `reward.overlong` adds
AHEAD_SHARE = "reward/ahead_share"


@task(
    task_run_name="reward-{settings.iteration:06d}", cache_policy=NO_CACHE, retries=1, retry_condition_fn=may_help_again
)
def reward(training: Training, settings: Settings, stage: Stage) -> Stage:
    """Score the experience and add columns `reward`, `reward/<part>`, `reward_failure`, of a judge `reward_answer`."""
    metrics = dict(stage.metrics)
    path = Path(stage.experience.path)
    training.session().say("reward")
    with timed(training, metrics, "reward"):
        names = ["sample_id", "prompt_id", "prompt", "response", *episode_column_names(path)]
        columns = read_columns(path, [*names, AGENT] if training.config.players else names)
        key = stage.experience.key(settings.iteration, "reward")
        scores = score(training, columns, "train", key, stage.experience.portion)
        if training.config.reward.overlong is not None:  # reading the tokens takes longer than all the rest
            lengths_B = read_columns(path, ["response_tokens"])["response_tokens"].lengths_B
            scores = punished(training.config, scores, lengths_B)
        rewards = reward_columns(scores)
        remember(training, settings.iteration, stage.experience.portion or 0, columns["prompt_id"], rewards["reward"])
        add_columns(path, rewards)
    metrics |= reward_metrics(scores) | agent_figures(training.config.players, columns, rewards["reward"])
    return Stage(stage.experience, metrics | _ahead(training))


def agent_figures(players: Sequence[str], columns: Mapping[str, Any], rewards_B: np.ndarray) -> dict[str, float]:
    """Return what each agent of a game earned in the mean, since of opponents the mean of all says nothing."""
    return {f"reward/{name}/mean": float(rewards_B[columns[AGENT] == seat].mean()) for seat, name in enumerate(players)}


def _ahead(training: Training) -> dict[str, float]:
    """Return the share of the responses whose score was begun while others were generated."""
    scorer = training.session().scorer
    return {} if scorer is None else {AHEAD_SHARE: scorer.ahead_share}


def score(training: Training, columns: dict[str, Any], split: str, key: str, portion: int | None = None) -> list[Score]:
    """Score responses by the configured source, and episodes by their environment, or by both.

    Args:
        columns: sample_id, prompt_id, prompt and response, one entry per row; with an environment those of episodes.
        split: prompt table that the prompts come from; functions see its columns.
        portion: number of the portion of the iteration's batch, of which it is not looked at how many failed: it may be
            small. None: it is no portion.

    Raises:
        UserError: more calls failed than `reward.max_failure_share` allows.
    """
    config = training.config
    if config.environment is None:
        return _score_by_source(training, columns, split, key, portion)
    scores = _score_by_source(training, columns, split, key, portion) if config.reward.kind is not None else None
    return with_environment(config, columns, scores, judged=portion is None)


def judge(training: Training, columns: dict[str, Any]) -> None:
    """Look at how many of a batch failed that was scored in portions; `columns` are all that experience then has.

    Raises:
        UserError: more than `reward.max_failure_share` allows.
    """
    config = training.config
    if config.environment is not None:
        check_episodes(config, columns)
    if config.reward.kind is None or config.reward.model is not None:
        return
    failures = columns["reward_failure"]
    if config.environment is not None:  # those are judged already
        failures = [None if of_play else failure for failure, of_play in zip(failures, columns[FAILURE], strict=True)]
    scores = [Score(0.0, {}, failure) for failure in failures]
    named = zip(columns["sample_id"], columns["prompt_id"], columns["prompt"], columns["response"], strict=True)
    samples = [Sample(name, prompt_id, prompt, response, {}) for name, prompt_id, prompt, response in named]
    check_failures(scores, samples, config.reward)


def _score_by_source(
    training: Training, columns: dict[str, Any], split: str, key: str, portion: int | None
) -> list[Score]:
    if training.config.reward.model is not None:
        return _score_by_model(training, columns, key)
    scorer = training.session().scorer
    assert scorer is not None
    samples = samples_of(training, columns, split)
    scores = scorer.score(samples, _portion_of(training.config.rollout, len(samples), portion))
    if portion is None:
        check_failures(scores, samples, training.config.reward)
    log_failures(scores, samples)
    return scores


def samples_of(training: Training, columns: dict[str, Any], split: str) -> list[Sample]:
    """Return responses as a source of rewards gets them, with their prompts' data; arguments as those of `score`."""
    rows = prompt_columns(training, split)
    return [
        Sample(sample_id, prompt_id, prompt, response, rows[prompt_id])
        for sample_id, prompt_id, prompt, response in zip(
            columns["sample_id"], columns["prompt_id"], columns["prompt"], columns["response"], strict=True
        )
    ]


def _portion_of(config: RolloutConfig, samples: int, portion: int | None) -> int | None:
    """Return how many samples make what these are a part of; None: nothing that was begun beside them goes on.

    That is the batch of a portion that others follow. A batch whose next rollout has begun stands for itself.
    """
    if portion is not None:
        return config.prompts * config.samples if portion < config.portions - 1 else None
    return samples if config.begins_ahead else None


def punished(config: TrainConfig, scores: list[Score], lengths_B: np.ndarray) -> list[Score]:
    """Add the part `overlong` to the rewards of training, if it is configured; failed rewards are not changed."""
    if (overlong := config.reward.overlong) is None:
        return scores
    limit = config.rollout.max_response_tokens
    penalties_B = overlong_penalty(
        lengths_B, max_tokens=limit, buffer_tokens=overlong.buffer_tokens, penalty=overlong.penalty
    )
    return [
        item
        if item.failure
        else dataclasses.replace(item, reward=item.reward + penalty, parts={**item.parts, OVERLONG: penalty})
        for item, penalty in zip(scores, penalties_B.tolist(), strict=True)
    ]


def _score_by_model(training: Training, columns: dict[str, list[str]], key: str) -> list[Score]:
    session = training.session()
    texts = [prompt + response for prompt, response in zip(columns["prompt"], columns["response"], strict=True)]
    shares = np.array_split(np.arange(len(texts)), len(session.groups["reward"].spec.devices))
    budget = scored_tokens(training.config)
    replies = session.call("reward", [ScoreTexts([texts[row] for row in share], budget) for share in shares], key)
    scores = [Score(float(value), {}, None) for reply in replies for value in reply.scores_B]
    if problems := [problem for item in scores if (problem := out_of_bounds(item.reward))]:
        raise UserError(
            f"{training.config.reward.source} gave {len(problems)} of {len(scores)} responses no score that can be a "
            f"reward; the first is {problems[0]}",
            "look at the reward model: weights that are not finite, or a dtype that overflows (model.dtype=float32)",
        )
    return scores


def reward_columns(scores: list[Score]) -> dict[str, Any]:
    """Return the experience columns of scores."""
    parts = sorted({name for score in scores for name in score.parts})
    return {
        "reward": np.asarray([score.reward for score in scores], np.float64),
        "reward_failure": [score.failure for score in scores],
        **({"reward_answer": [score.answer for score in scores]} if _judged(scores) else {}),
        **{f"reward/{name}": np.asarray([score.parts.get(name, np.nan) for score in scores]) for name in parts},
    }


def _judged(scores: list[Score]) -> bool:
    return any(score.answer is not None for score in scores)


def reward_metrics(scores: list[Score]) -> dict[str, float]:
    """Return mean, spread, extremes, failures and the mean of every part."""
    return reward_figures(reward_columns(scores))


def reward_figures(columns: dict[str, Any]) -> dict[str, float]:
    """Return `reward_metrics` of the columns that scores have become."""
    rewards_B = columns["reward"]
    parts = {name: column[~np.isnan(column)] for name, column in columns.items() if name.startswith("reward/")}
    return {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std()),
        "reward/min": float(rewards_B.min()),
        "reward/max": float(rewards_B.max()),
        "reward/failures": float(sum(failure is not None for failure in columns["reward_failure"])),
        **{f"{name}_mean": float(values.mean()) for name, values in parts.items()},
    }
