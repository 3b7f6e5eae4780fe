"""Rollout: the policy answers the iteration's prompts, and the answers become an experience file.

The engines begin before the task does: as soon as the iteration before has nothing left for them, so that they need
not wait for its record, nor for Prefect to end one child flow and begin another.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from engines.commands.rollout import Sampling
from penstock.base.ragged import Ragged
from penstock.data.agents import agent_numbers
from penstock.session.figures import generation_figures
from penstock.session.requests import BegunGeneration, BegunRollout, GenerationRequest, Rollout
from penstock.session.rollout.draw import draw
from penstock.session.rollout.episodes import episode_column_names, episode_figures
from penstock.session.rollout.generation import Responses, begin_generation, take_responses
from penstock.session.rollout.score_ahead import sample_id, scoring_ahead
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings, next_settings
from penstock.state.experience import AGENT, ExperienceRef, column_names, origin_of, read_columns, write_columns_apart
from penstock.state.manifest import Progress
from tasks.iteration.checkpoint import checkpoint_due

ROLLOUT_LOGPROBS = "logprobs_rollout"  # column: log-probs under the distributions that tokens were sampled from
DESCRIBING = ("prompt_tokens", "response_tokens", "truncated", "policy_version", "loss_mask")
RESAMPLED = "resample"  # column that says which rollout of the iteration a sample is from, once there are several


def begin_rollout(training: Training, settings: Settings, progress: Progress) -> Rollout:
    """Draw the prompts of the iteration after `progress` and let the engines begin; return the rollout's handle.

    They begin nothing where an interrupted attempt of the iteration left the responses that they would give.
    """
    prompts = drawn(training, settings.iteration, progress.prompt_cursor, training.config.rollout.prompts)
    rollout, generation = Rollout(settings.iteration, f"{settings.iteration}/rollout"), None
    if not _left_behind(training, settings, progress, prompts):
        generation = _begin(training, settings, prompts, rollout.key, purpose=0)
    training.session().rollouts[rollout.key] = BegunRollout(prompts, generation)
    return rollout


def begin_next_rollout(training: Training, progress: Progress) -> Rollout | None:
    """Begin the rollout after `progress`, unless a checkpoint comes first, which needs the engines, too."""
    config, done = training.config, progress.iteration
    if done == config.iterations or checkpoint_due(config, done):
        return None
    return begin_rollout(training, next_settings(training, progress), progress)


@task(task_run_name="rollout-{settings.iteration:06d}", cache_policy=NO_CACHE)
def rollout(training: Training, settings: Settings, begun: Rollout) -> Stage:
    """Wait for the responses of a rollout that has begun, and make the experience of them."""
    session, path = training.session(), training.run.experience(begun.iteration)
    metrics: dict[str, float] = {}
    session.say("rollout")
    with timed(training, metrics, "rollout") as span:
        taken = session.rollouts.pop(begun.key)
        if taken.generation is None:
            columns = read_columns(path, [*DESCRIBING, *episode_column_names(path)])
        else:
            responses = take_responses(training, taken.generation)
            span.began -= responses.metrics["rollout/ahead_s"]
            columns = experience_columns(training, settings, taken.prompts, responses)
            write_columns_apart(path, columns, _origin(training, settings))
            metrics |= responses.metrics
        experience, figures = _describe(training, begun.key, path, columns)
    if taken.generation is not None:
        metrics["rollout/tokens_per_s"] = experience.response_tokens / metrics["time/rollout_s"]
    return Stage(experience, metrics | figures)


def further_rollout(training: Training, settings: Settings, cursor: int, size: int, number: int) -> dict[str, Any]:
    """Answer further prompts of an iteration and return their columns.

    Args:
        cursor: prompts drawn from the data before.
        size: prompts to draw.
        number: of the rollout within the iteration, from 1 on.
    """
    prompts = drawn(training, settings.iteration, cursor, size)
    key = f"{settings.iteration}/resample-{number}"
    generation = _begin(training, settings, prompts, key, purpose=2 + number)
    return experience_columns(training, settings, prompts, take_responses(training, generation))


def drawn(training: Training, iteration: int, cursor: int, size: int) -> pd.DataFrame:
    """Return the rows of the prompt table that a rollout answers."""
    return training.session().prompts["train"].frame.iloc[draw(training, iteration, cursor, size)]


def _begin(training: Training, settings: Settings, prompts: pd.DataFrame, key: str, purpose: int) -> BegunGeneration:
    request = GenerationRequest(prompts, key, sampling(training, settings, purpose))
    return begin_generation(training, request, scoring_ahead(training, settings.iteration, prompts))


def experience_columns(
    training: Training, settings: Settings, prompts: pd.DataFrame, responses: Responses
) -> dict[str, Any]:
    """Return the columns of new experience."""
    config = training.config
    repeats = np.repeat(np.arange(len(prompts)), config.rollout.samples)
    ids = prompts["prompt_id"].to_numpy()[repeats]
    columns = {
        "sample_id": [sample_id(settings.iteration, name, n % config.rollout.samples) for n, name in enumerate(ids)],
        "prompt_id": list(ids),
        "group": repeats,
        "prompt": list(prompts["prompt_text"].to_numpy()[repeats]),
        "response": responses.texts,
        "prompt_tokens": Ragged.of(list(prompts["prompt_tokens"]), np.int32).take(repeats),
        "response_tokens": responses.tokens,
        "loss_mask": responses.loss_mask,
        "truncated": responses.truncated_B,
        "policy_version": np.full(len(ids), responses.policy_version),
        **responses.episodes,
    }
    if config.data.agents is not None:
        columns[AGENT] = agent_numbers(prompts, config.data.agents, "data.train")[repeats]
    if responses.logprobs is not None:
        columns[ROLLOUT_LOGPROBS] = responses.logprobs
    return columns


def sampling(training: Training, settings: Settings, purpose: int = 0) -> Sampling:
    """Return how tokens are sampled in a rollout of this iteration.

    Args:
        purpose: tells the iteration's generations apart in their seeds. 0: its first rollout; 1: evaluation; 2: the
            greedy baseline; from 3 on: further rollouts.
    """
    config = training.config.rollout
    return Sampling(
        samples=config.samples,
        temperature=settings.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_response_tokens,
        ignore_eos=config.ignore_eos,
        seed=[training.config.seed, settings.iteration, purpose],
        logprobs=training.config.algorithm.correction is not None,
    )


def _origin(training: Training, settings: Settings) -> dict[str, Any]:
    """Return what the responses of an iteration's first rollout depend on, besides policy and prompts."""
    environment = training.config.environment
    sampled_with = dataclasses.asdict(sampling(training, settings))
    del sampled_with["seed"]
    return {
        "seed": training.config.seed,
        **sampled_with,
        "environment": environment.model_dump(mode="json") if environment is not None else None,
    }


def _left_behind(training: Training, settings: Settings, progress: Progress, prompts: pd.DataFrame) -> bool:
    """Whether an interrupted attempt left this rollout's responses; if it left others, the difference is logged."""
    path = training.run.experience(settings.iteration)
    if not _is_whole(path, progress.policy_version):
        return False
    differences = _differences(training, settings, prompts, path)
    if differences:
        get_run_logger().warning(
            "iteration %d: responses are generated anew, those of the interrupted attempt were sampled with %s",
            settings.iteration,
            ", ".join(differences),
        )
    return not differences


def _differences(training: Training, settings: Settings, prompts: pd.DataFrame, path: Path) -> list[str]:
    """Return in words what the responses in an experience file were sampled with that this rollout's would not be."""
    was, now = origin_of(path), _origin(training, settings)
    sampled = [f"{name} {was.get(name)} instead of {now[name]}" for name in now if was.get(name) != now[name]]
    wanted_ids = list(prompts["prompt_id"].repeat(training.config.rollout.samples))
    same_prompts = read_columns(path, ["prompt_id"])["prompt_id"] == wanted_ids
    return sampled if same_prompts else [*sampled, "other prompts"]


def _is_whole(path: Path, policy_version: int) -> bool:
    """Whether a file holds the whole first rollout of this policy, and no other."""
    if not path.exists():
        return False
    names = column_names(path)
    if "response_tokens" not in names:  # the machine was restarted before they had reached the disk
        return False
    if RESAMPLED in names:  # the file does not say how many prompts it took: all rollouts are repeated, alike
        return False
    return bool((read_columns(path, ["policy_version"])["policy_version"] == policy_version).all())


def _describe(
    training: Training, key: str, path: Path, columns: dict[str, Any]
) -> tuple[ExperienceRef, dict[str, float]]:
    lengths = columns["response_tokens"].lengths_B
    experience = ExperienceRef(
        path=str(path),
        samples=len(lengths),
        prompt_tokens=int(columns["prompt_tokens"].offsets_B1[-1]),
        response_tokens=int(columns["response_tokens"].offsets_B1[-1]),
        policy_version=int(columns["policy_version"][0]),
        prompts=training.config.rollout.prompts,
    )
    return experience, {
        "rollout/tokens": float(lengths.sum()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_share": float(np.mean(columns["truncated"])),
        **episode_figures(columns),
        **generation_figures(training, key, columns["prompt_tokens"].lengths_B, lengths),
    }
