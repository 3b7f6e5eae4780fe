"""Greedy baseline: the policy's likeliest response to each prompt, and its reward (ReMax)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import generate
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings
from penstock.state.experience import add_columns, read_columns
from penstock.tasks.iteration.reward import punished, score
from penstock.tasks.iteration.rollout import sampling

GREEDY_REWARD = "reward_greedy"


@task(task_run_name="greedy-baseline-{settings.iteration:06d}", cache_policy=NO_CACHE)
def greedy_baseline(training: Training, settings: Settings, stage: Stage) -> Stage:
    """Answer every prompt of the experience once without sampling; add each row the reward of its prompt's answer.

    The policy is the one that generated the experience. The reward passes through everything that the samples' passes
    through, so that a sample equal to the greedy response has advantage 0.
    """
    metrics = dict(stage.metrics)
    path, key = Path(stage.experience.path), f"{settings.iteration}/greedy-baseline"
    with timed(training, metrics, "greedy_baseline"):
        columns = read_columns(path, ["group", "prompt_id", "prompt", "prompt_tokens"])
        _, first_G, group_B = np.unique(columns["group"], return_index=True, return_inverse=True)
        tokens = columns["prompt_tokens"].take(first_G)
        prompts = pd.DataFrame(
            {
                "prompt_id": [columns["prompt_id"][row] for row in first_G],
                "prompt": [columns["prompt"][row] for row in first_G],
                "prompt_tokens": [tokens.row(number) for number in range(len(tokens))],
            }
        )
        greedy = replace(sampling(training, settings, purpose=2), samples=1, temperature=0.0, logprobs=False)
        responses = generate(training, GenerationRequest(prompts, key, greedy))
        answered = {
            "sample_id": [f"{settings.iteration:06d}/{name}/greedy" for name in prompts["prompt_id"]],
            "prompt_id": list(prompts["prompt_id"]),
            "prompt": list(prompts["prompt"]),
            "response": responses.texts.to_pylist(),
            **responses.episodes,
        }
        scores = punished(
            training.config, score(training, answered, "train", f"{key}-score"), responses.tokens.lengths_B
        )
        rewards_G = np.asarray([item.reward for item in scores], np.float64)
        add_columns(path, {GREEDY_REWARD: rewards_G[group_B]})
    return Stage(stage.experience, metrics | {"reward/greedy_mean": float(rewards_G.mean())})
