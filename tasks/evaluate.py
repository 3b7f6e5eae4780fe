"""Evaluate: the policy answers held-out prompts that no update ever sees."""

from __future__ import annotations

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from state.experience import Ragged, write_columns
from tasks.generate import generate
from tasks.reward import reward_columns, score
from tasks.session import Training, timed

FULL_REWARD = 1.0


@task(task_run_name="evaluate-{iteration:06d}", cache_policy=NO_CACHE)
def evaluate(training: Training, iteration: int) -> dict[str, float]:
    """Return held-out accuracy and mean reward after `iteration` (0: before training).

    Accuracy is the share of responses with a reward of at least 1, the full reward of the built-in functions.
    """
    config, table = training.config, training.session().prompts["heldout"]
    prompts = table.frame.head(config.evaluate.prompts or len(table))
    metrics: dict[str, float] = {}
    with timed(metrics, "evaluate"):
        sampling = {
            "samples": 1,
            "temperature": config.evaluate.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": config.rollout.max_response_tokens,
            "ignore_eos": False,
        }
        responses = generate(training, prompts, f"{iteration}/evaluate", [config.seed, iteration, 1], sampling)
        columns = {
            "sample_id": [f"evaluation-{iteration:06d}/{name}" for name in prompts["prompt_id"]],
            "prompt_id": list(prompts["prompt_id"]),
            "prompt": list(prompts["prompt_text"]),
            "response": responses.texts,
        }
        scores = score(training, columns, "heldout", f"{iteration}/evaluate-score")
        rewards = np.asarray([item.reward for item in scores])
        tokens: dict[str, Ragged] = {"response_tokens": responses.tokens}
        write_columns(training.run.evaluation(iteration), {**columns, **tokens, **reward_columns(scores)})
    return metrics | {
        "heldout/accuracy": float((rewards >= FULL_REWARD).mean()),
        "heldout/reward": float(rewards.mean()),
    }
