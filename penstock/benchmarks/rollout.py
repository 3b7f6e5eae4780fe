"""Tokens per second of the rollout task: prompts to ranks, generation, responses into an experience file.

Left out: reward and updates; the weights stay those of the model folder.
"""

from __future__ import annotations

from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, device_count, rollout_groups, settings_of
from penstock.configs.schema import TrainConfig
from penstock.session.rollout.draw import draw
from penstock.session.session import Training
from penstock.state.manifest import Progress
from penstock.tasks.iteration.rollout import begin_rollout, rollout

Prompts = list[list[int]]  # token ids by prompt
FIGURES = {
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "mfu": "rollout/mfu",
    "peak_gib": "memory/gpu_gib",
    "response_tokens_mean": "rollout/response_length_mean",
    "truncated_share": "rollout/truncated_share",
}


def measure(config: TrainConfig, command: str, *, rounds: int, skip: int) -> tuple[BenchResult, list[Prompts]]:
    """Generate `rounds` iterations' worth of responses; return the medians after the first `skip`, and all prompts.

    Raises:
        UserError: the recipe is wrong, or too few rounds are asked for.
    """
    steady(range(rounds), skip)
    with rollout_groups(config) as (training, progress):
        progress.start(rounds)
        rows, prompts = [], []
        for number in range(1, rounds + 1):
            at = Progress(prompt_cursor=(number - 1) * config.rollout.prompts)
            prompts.append(drawn(training, number, at.prompt_cursor))
            settings = settings_of(training.config, number)
            rows.append(rollout.fn(training, settings, begin_rollout(training, settings, at)).metrics)
            progress.advance(number, rows[-1])
    figures = medians(steady(rows, skip), FIGURES)
    figures["rollout_tokens_per_s_per_gpu"] = figures["rollout_tokens_per_s"] / device_count(config, "rollout")
    result = new_result(
        "rollout",
        command,
        figures,
        settings={"rounds": rounds, "skipped": skip, **describe(config)},
        details=[{"round": number, **row} for number, row in enumerate(rows, start=1)],
    )
    return result, prompts


def drawn(training: Training, iteration: int, cursor: int) -> Prompts:
    """Return the prompts that an iteration's rollout answers, as the rollout draws them."""
    rows = draw(training, iteration, cursor, training.config.rollout.prompts)
    tokens = training.session().prompts["train"].frame["prompt_tokens"].iloc[rows]
    return [row.tolist() for row in tokens]
