"""Tokens per second of the rollout task: prompts to ranks, generation, responses into an experience file.

Where the recipe corrects rollouts, it also says how far their log-probs are from the actor's, over whole responses.
Left out: reward and updates; the weights stay those of the model folder.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.kl import kl_estimate
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, device_count, rollout_groups, settings_of
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.logprob_gap import LogprobsToCompare
from penstock.session.rollout.draw import draw
from penstock.session.session import Training
from penstock.session.settings import Settings
from penstock.state.experience import ExperienceRef, read_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.forward_passes import from_ranks
from penstock.tasks.iteration.rollout import ROLLOUT_LOGPROBS, begin_rollout, rollout

Prompts = list[list[int]]  # token ids by prompt
COMPARED = 32  # responses of the last round
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
        rows, prompts, gaps = [], [], dict[str, float]()
        for number in range(1, rounds + 1):
            at = Progress(prompt_cursor=(number - 1) * config.rollout.prompts)
            prompts.append(drawn(training, number, at.prompt_cursor))
            settings = settings_of(training.config, number)
            stage = rollout.fn(training, settings, begin_rollout(training, settings, at))
            rows.append(stage.metrics)
            progress.advance(number, rows[-1])
            if number == rounds and comparable(training.config, settings):
                gaps = logprob_gaps(training, settings, stage.experience)
    figures = medians(steady(rows, skip), FIGURES)
    figures |= gaps
    figures["rollout_tokens_per_s_per_gpu"] = figures["rollout_tokens_per_s"] / device_count(config, "rollout")
    result = new_result(
        "rollout",
        command,
        figures,
        settings={"rounds": rounds, "skipped": skip, **describe(config)},
        details=[{"round": number, **row} for number, row in enumerate(rows, start=1)],
    )
    return result, prompts


def comparable(config: TrainConfig, settings: Settings) -> bool:
    """Whether the experience has log-probs of what the actor computes without further ado."""
    plain = config.environment is None and config.data.image_column is None and not config.actor.replays
    return config.algorithm.correction is not None and settings.temperature == 1 and plain


def logprob_gaps(training: Training, settings: Settings, experience: ExperienceRef) -> dict[str, float]:
    """Return how far the rollout's log-probs of some responses are from the actor's.

    The mean and the largest difference of a token, and the mean KL divergence of the rollout's policy from the actor's
    (k3), nats.
    """
    names = ("prompt_tokens", "response_tokens", ROLLOUT_LOGPROBS)
    columns = read_columns(experience.path, names)
    count = len(columns["response_tokens"])
    rows_B = np.arange(0, count, -(-count // COMPARED))
    prompts, responses, theirs = (columns[name].take(rows_B) for name in names)
    asked = LogprobsToCompare(prompts, responses, settings.micro_batch_tokens)
    ours = from_ranks(training.session().call("actor", asked, "bench/logprobs"), responses.lengths_B)
    ours_T, theirs_T = ours.values_T.astype(np.float64), theirs.values_T
    apart_T = np.abs(ours_T - theirs_T)
    return {
        "logprob_gap": float(apart_T.mean()),
        "logprob_gap_max": float(apart_T.max()),
        "rollout_kl": float(kl_estimate(theirs_T, ours_T, "k3").mean()),
    }


def drawn(training: Training, iteration: int, cursor: int) -> Prompts:
    """Return the prompts that an iteration's rollout answers, as the rollout draws them."""
    rows = draw(training, iteration, cursor, training.config.rollout.prompts)
    tokens = training.session().prompts["train"].frame["prompt_tokens"].iloc[rows]
    return [row.tolist() for row in tokens]
