"""Evaluate: the policy answers held-out prompts that no update ever sees, and evaluators measure the responses.

Left out: what they measure (penstock/evaluators/).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.data.agents import numbers_of_players
from penstock.engines.commands.forward import Logprobs
from penstock.engines.commands.rollout import Sampling
from penstock.evaluators.heldout import HeldOut
from penstock.evaluators.loading import BUILT_IN
from penstock.evaluators.rewards import FULL_REWARD
from penstock.evaluators.running import run_evaluators
from penstock.rewards.pool import Score
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import Responses, generate, images_of
from penstock.session.session import Training, prompt_columns, timed
from penstock.state.experience import AGENT, IMAGES, add_columns, consolidate, write_columns
from penstock.tasks.iteration.forward_passes import in_row_order
from penstock.tasks.iteration.reward import reward_columns, score


@task(task_run_name="evaluate-{iteration:06d}", cache_policy=NO_CACHE)
def evaluate(training: Training, iteration: int, budget: int) -> dict[str, float]:
    """Return held-out accuracy, mean reward and what the evaluators found after `iteration` (0: before training).

    Accuracy is the share of responses with a reward of at least 1, the full reward of the built-in functions; how they
    were sampled is the metric `heldout/temperature`, so that no accuracy is shown without it. With `evaluate.greedy`
    the prompts are answered once more, greedily; of those responses accuracy alone is kept.

    Args:
        budget: tokens of one of the actor's forward passes.
    """
    config, table = training.config, training.session().prompts["heldout"]
    prompts = table.frame.head(config.evaluate.prompts or len(table))
    metrics: dict[str, float] = {}
    before = config.trains and not iteration
    training.session().say("evaluating the model before training" if before else "evaluation")
    with timed(training, metrics, "evaluate"):
        sampling = Sampling(
            samples=config.evaluate.samples,
            temperature=config.evaluate.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=config.rollout.max_response_tokens,
            ignore_eos=False,
            seed=[config.seed, iteration, 1],
        )
        columns, responses, scores = answered(training, prompts, sampling, f"{iteration}/evaluate", iteration)
        generated = {"response_tokens": responses.tokens, "truncated": responses.truncated_B}
        if responses.episodes:
            generated["loss_mask"] = responses.loss_mask
        write_columns(training.run.evaluation(iteration), {**columns, **generated, **reward_columns(scores)})
        heldout = held_out(training, columns, responses, scores)
        if "kl" in (config.evaluate.evaluators or ()):
            heldout = with_logprobs(training, iteration, budget, prompts, responses, heldout)
        metrics |= evaluated(training, heldout)
        if config.evaluate.greedy and sampling.temperature:
            best = replace(sampling, samples=1, temperature=0.0)
            *_, greedy = answered(training, prompts, best, f"{iteration}/evaluate-greedy", iteration)
            metrics["heldout/greedy_accuracy"] = accuracy(greedy)
    return metrics | {
        "heldout/accuracy": accuracy(scores),
        "heldout/reward": float(heldout.rewards_B.mean()),
        "heldout/temperature": config.evaluate.temperature,
    }


def answered(
    training: Training, prompts: pd.DataFrame, sampling: Sampling, key: str, iteration: int
) -> tuple[dict[str, list[str]], Responses, list[Score]]:
    """Let the policy answer held-out prompts; return the columns of its responses, these, and what they earned."""
    responses = generate(training, GenerationRequest(prompts, key, sampling, "heldout"))
    players, rows = training.config.players, sampling.samples * training.config.conversations
    ids = [name for name in prompts["prompt_id"] for _ in range(rows)]
    texts, _ = responses.prompts_of(prompts, rows)
    columns = {
        "sample_id": [f"evaluation-{iteration:06d}/{name}" for name in numbered(ids, rows)],
        "prompt_id": ids,
        "prompt": texts,
        "response": responses.texts.to_pylist(),
        **responses.episodes,
        **(
            {}
            if (images := images_of(prompts)) is None
            else {IMAGES: images.take(np.repeat(range(len(prompts)), rows))}
        ),
        **({AGENT: numbers_of_players(len(prompts), len(players), sampling.samples)} if players else {}),
    }
    return columns, responses, score(training, columns, "heldout", f"{key}-score")


def accuracy(scores: list[Score]) -> float:
    """Return the share of responses with the full reward."""
    return float(np.mean([item.reward >= FULL_REWARD for item in scores]))


def numbered(ids: list[str], samples: int) -> list[str]:
    """Return names of rows: the prompt's, and the number of the response if a prompt has several."""
    return ids if samples == 1 else [f"{name}/{row % samples}" for row, name in enumerate(ids)]


def held_out(training: Training, columns: dict[str, list[str]], responses: Responses, scores: list[Score]) -> HeldOut:
    """Return what evaluators see."""
    rows = prompt_columns(training, "heldout")
    return HeldOut(
        samples=training.config.evaluate.samples * training.config.conversations,
        prompt_ids=columns["prompt_id"],
        prompts=columns["prompt"],
        rows=[rows[name] for name in columns["prompt_id"]],
        texts=columns["response"],
        tokens=responses.tokens,
        rewards_B=np.asarray([item.reward for item in scores]),
        truncated_B=responses.truncated_B,
        agents=tuple(training.config.players),
    )


def with_logprobs(
    training: Training, iteration: int, budget: int, prompts: pd.DataFrame, responses: Responses, heldout: HeldOut
) -> HeldOut:
    """Compute the responses' log-probs under actor and reference, and add them to the figures' columns and to the file.

    Both are taken at the temperature of the evaluation, for greedy responses at temperature 1.
    """
    config, path = training.config, training.run.evaluation(iteration)
    _, tokens = responses.prompts_of(prompts, heldout.samples)
    add_columns(path, {"prompt_tokens": tokens, "loss_mask": responses.loss_mask})
    temperature = config.evaluate.temperature or 1.0
    passes: dict[Literal["actor", "reference"], str] = {"actor": "logprobs", "reference": "logprobs_reference"}
    columns = {}
    for role, name in passes.items():
        command = Logprobs(str(path), role, temperature, budget)
        replies = training.session().call(role, command, f"{iteration}/evaluate-{name}")
        columns[name] = in_row_order(replies, path)
    add_columns(path, columns)
    consolidate(path)
    logprobs, reference_logprobs = columns.values()
    return replace(
        heldout, logprobs=logprobs, reference_logprobs=reference_logprobs, counted_T=responses.loss_mask.values_T
    )


def evaluated(training: Training, heldout: HeldOut) -> dict[str, float]:
    """Return the evaluators' figures, and `heldout/evaluator_failures` where the user's own could fail.

    One that fails is logged with the reason; the training goes on, since nothing is learnt from these figures.
    """
    specs = training.config.evaluate.evaluators or ()
    figures, failures = run_evaluators(specs, heldout)
    for spec, reason in failures.items():
        get_run_logger().warning("evaluator %s failed, its figures are missing: %s", spec, reason)
    own = any(spec not in BUILT_IN for spec in specs)
    return figures | ({"heldout/evaluator_failures": float(len(failures))} if own else {})
