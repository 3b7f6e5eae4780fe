"""What it costs that an agent asks for its turns over HTTP: a recipe's rollouts with it, and with its environment.

Two trainings as a user starts them (penstock/benchmarks/step.py), one after the other, of the same episodes: the
recipe, whose environment answers inside the loop, and the recipe with an agent that plays by the same rules. Where
generations are reproducible both sample the same tokens; the result says whether they have. Left out: agents whose own
work takes long, which is theirs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe
from penstock.benchmarks.step import trained
from penstock.benchmarks.workload.prompts import with_prompts
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.environments.loading import asks_policy

ONLY_ROLLOUTS = ("evaluate.every=0", "checkpoint.every=0")
FIGURES = {
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "engine_wait_share": "rollout/engine_wait_share",
    "turns_mean": "rollout/turns_mean",
    "response_length_mean": "rollout/response_length_mean",
}


def measure(recipe: Path, overrides: list[str], command: str, *, agent: str, skip: int) -> BenchResult:
    """Train both ways; return the medians after the first `skip` iterations, and the ratio of tokens per second.

    Args:
        agent: `module:name` of the class that asks, instead of the recipe's environment.

    Raises:
        UserError: the recipe has no environment that answers, the agent does not ask, too few iterations are asked
            for, or a training failed.
    """
    overrides = [*overrides, *ONLY_ROLLOUTS]
    asking = f"environment.type={agent}"
    config, other = load_config(recipe, overrides), load_config(recipe, [*overrides, asking])
    steady(range(config.iterations), skip)
    _check_who_asks(config, other)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        overrides = [*overrides, *with_prompts(config, Path(scratch))]
        inside, _ = trained(recipe, overrides, Path(scratch) / "inside")
        asked, _ = trained(recipe, [*overrides, asking], Path(scratch) / "asked")
    figures, peer = (medians(steady(rows, skip), FIGURES) for rows in (asked, inside))
    share = figures["rollout_tokens_per_s"] / peer["rollout_tokens_per_s"]
    return new_result(
        "gateway",
        command,
        {**figures, "share_of_inside": share},
        peers={"inside": peer},
        peers_command=command,
        settings={
            "iterations": config.iterations,
            "skipped": skip,
            "agent": agent,
            "samples": config.rollout.prompts * config.rollout.samples,
            "same_tokens": same_tokens(inside, asked),
            **describe(config),
        },
        details=[
            {**row, "mode": mode, "iteration": number}
            for mode, found in (("asked", asked), ("inside", inside))
            for number, row in enumerate(found, start=1)
        ],
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
