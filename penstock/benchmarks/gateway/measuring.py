"""What it costs that an agent asks for its turns over HTTP: a recipe's rollouts with it, and with its environment.

Two trainings as a user starts them (penstock/benchmarks/step.py), one after the other, of the same episodes: the
recipe, whose environment answers inside the loop, and the recipe with an agent that plays by the same rules. Where
generations are reproducible both sample the same tokens; the result says whether they have. The recipe comes first and
is kept (penstock/benchmarks/reporting/halves.py). Left out: agents whose own work takes long, which is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.halves import Half, rows_of, scratch_folder
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe
from penstock.benchmarks.step import trained
from penstock.benchmarks.workload.prompts import with_prompts
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.environments.loading import asks_policy

INSIDE = "inside"  # the training whose environment answers inside the loop
ONLY_ROLLOUTS = ("evaluate.every=0", "checkpoint.every=0")
FIGURES = {
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "engine_wait_share": "rollout/engine_wait_share",
    "turns_mean": "rollout/turns_mean",
    "response_length_mean": "rollout/response_length_mean",
}


def measure(
    recipe: Path,
    overrides: list[str],
    command: str,
    *,
    agent: str,
    skip: int,
    out: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> BenchResult:
    """Train both ways; return the medians after the first `skip` iterations, and the ratio of tokens per second.

    Args:
        agent: `module:name` of the class that asks, instead of the recipe's environment.
        out: the result's file, beside which the training inside is kept once it has ended; what an earlier command
            has kept there is not repeated.
        say: told where that is, and where a training is that was cut off.

    Raises:
        UserError: the recipe has no environment that answers, the agent does not ask, too few iterations are asked
            for, a training failed, or what is kept is of other work or another machine.
    """
    overrides = [*overrides, *ONLY_ROLLOUTS]
    asking = f"environment.type={agent}"
    config, other = load_config(recipe, overrides), load_config(recipe, [*overrides, asking])
    steady(range(config.iterations), skip)
    _check_who_asks(config, other)
    half = Half("gateway", INSIDE, config, command, out, {})
    kept = half.ended()
    with scratch_folder(say) as scratch:
        overrides = [*overrides, *with_prompts(config, scratch)]
        inside: Sequence[Mapping[str, float]]
        if kept is not None:
            inside = kept.details
        else:
            inside, _ = trained(recipe, overrides, scratch / INSIDE)
        peer = medians(steady(inside, skip), FIGURES)
        if kept is None:
            half.keep(peer, inside)
        say(half.told(scratch / "asked"))
        asked, _ = trained(recipe, [*overrides, asking], scratch / "asked")
    figures = medians(steady(asked, skip), FIGURES)
    share = figures["rollout_tokens_per_s"] / peer["rollout_tokens_per_s"]
    return new_result(
        "gateway",
        command,
        {**figures, "share_of_inside": share},
        peers={INSIDE: peer},
        peers_command=command if kept is None else kept.command,
        settings={
            "iterations": config.iterations,
            "skipped": skip,
            "agent": agent,
            "samples": config.rollout.prompts * config.rollout.samples,
            "same_tokens": same_tokens(inside, asked),
            **describe(config),
        },
        details=[*rows_of("asked", asked), *rows_of(INSIDE, inside)],
    )


def _check_who_asks(config: TrainConfig, other: TrainConfig) -> None:
    """Raise UserError unless the recipe's environment answers and the other asks."""
    if config.environment is None or asks_policy(config.environment):
        raise UserError(
            "the recipe has no environment that answers inside the loop, to measure an agent beside",
            "give configs/calculator.yaml, or another recipe whose environment has reset and step",
        )
    if other.environment is None or not asks_policy(other.environment):
        raise UserError(
            "the class of --agent does not ask the policy", "give one with 'run' (docs/environments.md, Agents)"
        )


def same_tokens(inside: Sequence[Mapping[str, float]], asked: Sequence[Mapping[str, float]]) -> bool:
    """Whether all iterations had as many tokens and turns, and the same mean reward."""
    names = ("rollout/tokens", "rollout/turns_mean", "reward/mean")
    return [[row[name] for name in names] for row in inside] == [[row[name] for name in names] for row in asked]
