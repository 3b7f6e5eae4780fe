"""Tokens per second of the rollout task: prompts to ranks, generation, responses into an experience file.

Left out: reward and updates; the weights stay those of the model folder.
"""

from __future__ import annotations

from benchmarks.result import BenchResult, medians, new_result, steady
from benchmarks.session import describe, device_count, rollout_groups, settings_of
from configs.schema import TrainConfig
from state.manifest import Progress
from tasks.rollout import rollout

FIGURES = {
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "mfu": "rollout/mfu",
    "peak_gib": "memory/gpu_gib",
    "response_tokens_mean": "rollout/response_length_mean",
    "truncated_share": "rollout/truncated_share",
}


def measure(config: TrainConfig, command: str, *, rounds: int, skip: int) -> BenchResult:
    """Generate `rounds` iterations' worth of responses; return the medians after the first `skip`.

    Raises:
        UserError: the recipe is wrong, or too few rounds are asked for.
    """
    steady(range(rounds), skip)
    with rollout_groups(config) as (training, progress):
        progress.start(rounds)
        rows = []
        for number in range(1, rounds + 1):
            at = Progress(prompt_cursor=(number - 1) * config.rollout.prompts)
            rows.append(rollout.fn(training, settings_of(training.config, number), at).metrics)
            progress.advance(number, rows[-1])
    figures = medians(steady(rows, skip), FIGURES)
    figures["rollout_tokens_per_s_per_gpu"] = figures["rollout_tokens_per_s"] / device_count(config, "rollout")
    return new_result(
        "rollout",
        command,
        figures,
        settings={"rounds": rounds, "skipped": skip, **describe(config)},
        details=[{"round": number, **row} for number, row in enumerate(rows, start=1)],
    )
