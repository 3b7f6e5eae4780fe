"""Rollout: the policy answers the iteration's prompts, and the answers become an experience file.

The engines begin before the task does: as soon as the iteration before has nothing left for them, so that they need
not wait for its record, nor for Prefect to end one child flow and begin another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.ragged import Ragged
from penstock.data.agents import agent_numbers
from penstock.session.draw import draw
from penstock.session.episodes import episode_column_names, episode_figures
from penstock.session.figures import generation_figures
from penstock.session.generation import begin_generation, generate
from penstock.session.score_ahead import sample_id, scoring_ahead
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings, next_settings
from penstock.state.experience import AGENT, ExperienceRef, column_names, origin_of, read_columns, write_columns_apart
from penstock.state.manifest import Progress
from tasks.iteration.checkpoint import checkpoint_due

ROLLOUT_LOGPROBS = "logprobs_rollout"  # column with those of what each token was drawn from, if they are compared
DESCRIBING = ("prompt_tokens", "response_tokens", "truncated", "policy_version", "loss_mask")
REFILL = "refill"  # column that says which rollout of the iteration a sample is from, once there are several


@task(task_run_name="rollout-{settings.iteration:06d}", cache_policy=NO_CACHE)
def rollout(training: Training, settings: Settings, progress: Progress) -> Stage:
    """Generate experience, or take the file that an interrupted attempt of this iteration left complete."""
    path, (key, seed) = training.run.experience(settings.iteration), _key_and_seed(training, settings)
    metrics: dict[str, float] = {}
    training.session().say("rollout")
    with timed(metrics, "rollout"):
        found = _complete(path, progress.policy_version)
        if found and (changes := _changes(training, settings, progress)):
            found = False
            note = "iteration %d: responses are generated anew, those of the interrupted attempt were drawn with %s"
            get_run_logger().warning(note, settings.iteration, changes)
        if not found:
            size = training.config.rollout.prompts
            columns, generation = answered(training, settings, progress.prompt_cursor, size, key, seed)
            write_columns_apart(path, columns, _origin(training, settings))
        else:
            generation = {}
            columns = read_columns(path, [*DESCRIBING, *episode_column_names(path)])
        experience, figures = _describe(training, key, path, columns)
    metrics["time/rollout_s"] += generation.get("rollout/ahead_s", 0.0)
    if generation:
        generation["rollout/tokens_per_s"] = experience.response_tokens / metrics["time/rollout_s"]
    return Stage(experience, metrics | generation | figures)


def begin_next_rollout(training: Training, progress: Progress) -> None:
    """Let the engines begin the rollout after `progress`, unless a checkpoint, which needs them too, comes first."""
    config, done = training.config, progress.iteration
    if done == config.iterations or checkpoint_due(config, done):
        return
    settings = next_settings(training, progress)
    if _found(training, settings, progress):
        return
    prompts = _drawn(training, settings.iteration, progress.prompt_cursor, config.rollout.prompts)
    asked = (prompts, *_key_and_seed(training, settings), sampling(training, settings))
    begin_generation(training, *asked, scoring_ahead(training, settings.iteration, prompts))


def answered(
    training: Training, settings: Settings, cursor: int, size: int, key: str, seed: list[int]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the columns of new experience, and the figures of its generation.

    Args:
        cursor: prompts drawn from the data before.
        size: prompts to draw.
        key: idempotency key of the command.
        seed: see `penstock.session.generation.generate`.
    """
    config, prompts = training.config, _drawn(training, settings.iteration, cursor, size)
    on_ended = scoring_ahead(training, settings.iteration, prompts)
    responses = generate(training, prompts, key, seed, sampling(training, settings), on_ended=on_ended)
    repeats = np.repeat(np.arange(size), config.rollout.samples)
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
    return columns, responses.metrics


def sampling(training: Training, settings: Settings) -> dict[str, Any]:
    """Sampling parameters of the rollout at this iteration."""
    config = training.config.rollout
    return {
        "samples": config.samples,
        "temperature": settings.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_tokens": config.max_response_tokens,
        "ignore_eos": config.ignore_eos,
        "logprobs": training.config.algorithm.correction is not None,
    }


def _key_and_seed(training: Training, settings: Settings) -> tuple[str, list[int]]:
    """Return the key and the seed of the iteration's first rollout."""
    return f"{settings.iteration}/rollout", [training.config.seed, settings.iteration, 0]


def _drawn(training: Training, iteration: int, cursor: int, size: int) -> pd.DataFrame:
    return training.session().prompts["train"].frame.iloc[draw(training, iteration, cursor, size)]


def _origin(training: Training, settings: Settings) -> dict[str, Any]:
    """Return what the responses of an iteration's first rollout depend on, besides policy and prompts."""
    environment = training.config.environment
    return {
        "seed": training.config.seed,
        **sampling(training, settings),
        "environment": environment.model_dump(mode="json") if environment is not None else None,
    }


def _found(training: Training, settings: Settings, progress: Progress) -> bool:
    """Whether an interrupted attempt left the experience of this policy, drawn as it would be drawn now."""
    path = training.run.experience(settings.iteration)
    return _complete(path, progress.policy_version) and not _changes(training, settings, progress)


def _complete(path: Path, policy_version: int) -> bool:
    """Whether a file holds the whole first rollout of this policy, and no other."""
    if not path.exists():
        return False
    names = column_names(path)
    if "response_tokens" not in names:  # the machine was restarted before they had reached the disk
        return False
    if REFILL in names:  # how many prompts it took is not in the file: all is done again, alike
        return False
    return bool((read_columns(path, ["policy_version"])["policy_version"] == policy_version).all())


def _changes(training: Training, settings: Settings, progress: Progress) -> str:
    """Return in what the iteration's file was drawn otherwise than it would be now; empty: in nothing."""
    config, path = training.config.rollout, training.run.experience(settings.iteration)
    was, now = origin_of(path), _origin(training, settings)
    changes = [f"{name} {was.get(name)} instead of {now[name]}" for name in now if was.get(name) != now[name]]
    prompts = _drawn(training, settings.iteration, progress.prompt_cursor, config.prompts)
    if read_columns(path, ["prompt_id"])["prompt_id"] != list(prompts["prompt_id"].repeat(config.samples)):
        changes.append("other prompts")
    return ", ".join(changes)


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
