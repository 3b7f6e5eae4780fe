"""Seconds and bytes of a reshard, and how long generation stands still for it.

Each round is a training's: an optimizer step on a few made-up rows (so that the weights differ), the reshard task, and
one token from the rollout engines, which have to wake up for it. The pause is the reshard and the waking: from then on
the engines take requests. `first_token_s` is what a user of the engine would see after the reshard: waking, a prompt's
prefill and one decoding step, with the commands' way to the ranks and back.

A recipe has one strategy, which follows from its placement; `overrides_of` places it for each of them. Left out:
full-sized updates (`bench update`) and rollouts (`bench rollout`), which would only make the rounds longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, device_count, load_recipe, rollout_groups, settings_of
from penstock.benchmarks.update import made_up_experience
from penstock.benchmarks.workload.experience import fixed_lengths
from penstock.checks.memory import check_memory
from penstock.checks.model.starting_model import check_model
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import read_shape
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import STRATEGIES, reshard_strategy
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import generate
from penstock.session.session import Stage, Training
from penstock.tasks.iteration.reshard import reshard
from penstock.tasks.iteration.rollout import sampling
from penstock.tasks.iteration.update import update_actor

OF_TRAININGS = tuple(name for name in STRATEGIES if name != "folder")  # that one is of engines that train nothing
FIGURES = {
    "reshard_s": "time/reshard_s",
    "reshard_rank_s": "reshard/rank_s",
    "reshard_bytes": "reshard/bytes",
    "wake_s": "rollout/wake_s",
    "first_token_s": "first_token_s",
    "pause_s": "pause_s",
}


@dataclass(frozen=True)
class Plan:
    """How often to reshard: `rounds` times, of which the first `skip` do not count, each after an `update` or not."""

    rounds: int
    skip: int
    update: bool


def measure(config: TrainConfig, command: str, plan: Plan) -> BenchResult:
    """Reshard with the recipe's own placement.

    Raises:
        UserError: the recipe is wrong, or too few rounds are asked for.
    """
    steady(range(plan.rounds), plan.skip)
    rows, engine = rounds_of(config, plan)
    settings = {**asdict(plan), **engine, **describe(config)}
    return new_result("reshard", command, figures_of(rows, plan.skip), settings=settings, details=rows)


def measure_strategies(
    recipe: Path, overrides: list[str], command: str, folder: Path, strategies: Sequence[str], plan: Plan
) -> BenchResult:
    """Reshard once per strategy, with a placement made for it; its figures are prefixed with its name.

    Args:
        folder: where prompts may be written.
        strategies: names of `OF_TRAININGS`; those that need more devices are left out.

    Raises:
        UserError: the recipe or a strategy is wrong, or no strategy fits the devices.
    """
    steady(range(plan.rounds), plan.skip)
    base = load_recipe(recipe, overrides, folder)
    devices, on_gpus = devices_for(base), bool(visible_gpus())
    missing = {name: missing_devices(name, devices) for name in strategies}
    placed = {
        name: load_recipe(recipe, [*overrides, *overrides_of(name, base, devices, on_gpus)], folder)
        for name, reason in missing.items()
        if reason is None
    }
    if not placed:
        raise UserError("no strategy fits this machine", "; ".join(filter(None, missing.values())))
    for config in placed.values():  # before the first one starts
        check_model(config)
        check_memory(config)
    figures: dict[str, float] = {}
    details: list[dict[str, Any]] = [
        {"strategy": name, "left_out": reason} for name, reason in missing.items() if reason
    ]
    engines: dict[str, Any] = {}
    for name, config in placed.items():
        rows, engines[name] = rounds_of(config, plan)
        figures |= {f"{name}_{figure}": value for figure, value in figures_of(rows, plan.skip).items()}
        details += [{"strategy": name, **row} for row in rows]
    settings = {**asdict(plan), "devices": devices, "engines": engines, **describe(base)}
    return new_result("reshard", command, figures, settings=settings, details=details)


def devices_for(config: TrainConfig) -> int:
    """Return how many devices strategies are placed on: all GPUs, else the recipe's CPU ranks and two at least."""
    return len(visible_gpus()) or max(2, device_count(config))


def figures_of(rows: Sequence[Mapping[str, float]], skip: int) -> dict[str, float]:
    """Return medians after the first `skip` rounds, and the longest reshard among them."""
    counted = steady(rows, skip)
    return {**medians(counted, FIGURES), "reshard_max_s": max(row["time/reshard_s"] for row in counted)}


def rounds_of(config: TrainConfig, plan: Plan) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return one row per round, and what the engines say: strategy, tensors that are shared and copied."""
    with rollout_groups(config) as (training, progress):
        progress.phase(f"resharding: {reshard_strategy(config)}")
        progress.start(plan.rounds)
        rows = []
        for number in range(1, plan.rounds + 1):
            rows.append(_round(training, number, plan.update))
            progress.advance(number, rows[-1])
        return rows, dict(training.session().engine_figures)


def _round(training: Training, number: int, update: bool) -> dict[str, float]:
    config, settings = training.config, settings_of(training.config, number)
    if update:
        rows = config.algorithm.mini_batches * config.rollout.samples
        lengths = fixed_lengths(rows, config.data.max_prompt_tokens, config.rollout.max_response_tokens)
        shape = read_shape(Path(training.session().model_folder))
        experience = made_up_experience(training, lengths, shape, number, number - 1)
        update_actor.fn(training, settings, Stage(experience, {}))
    row = reshard.fn(training, settings, number)
    begin = time.perf_counter()
    one = replace(sampling(training, settings), samples=1, max_tokens=1)
    prompts = training.session().prompts["train"].frame.iloc[: device_count(config, "rollout")]
    responses = generate(training, GenerationRequest(prompts, f"{number}/first_token", one))
    row["first_token_s"] = time.perf_counter() - begin
    row["rollout/wake_s"] = responses.metrics["rollout/wake_s"]
    return row | {"pause_s": row["time/reshard_s"] + row["rollout/wake_s"]}


def missing_devices(strategy: str, devices: int) -> str | None:
    """Return in plain words what a strategy lacks on this machine, or None.

    Raises:
        UserError: there is no such strategy.
    """
    if strategy not in OF_TRAININGS:
        raise UserError(f"there is no reshard strategy '{strategy}'", f"choose among {', '.join(OF_TRAININGS)}")
    if strategy == "shared" or devices >= 2:
        return None
    return f"{strategy} takes two devices or more, this machine has {devices}"


def overrides_of(strategy: str, config: TrainConfig, devices: int, on_gpus: bool) -> list[str]:
    """Return the overrides that place a recipe so that its reshard takes this strategy."""
    stage = 3 if strategy == "gather" else min(2, config.actor.zero_stage)
    engine = 2 if strategy == "local" else 1
    everywhere = list(range(devices - devices % engine))
    others: list[Role] = [role for role in config.roles if role != "rollout"]
    groups = {"main": _group(everywhere, [*others, "rollout"], on_gpus)}
    if strategy == "broadcast":
        half = devices // 2
        groups = {
            "train": _group(everywhere[:half], others, on_gpus),
            "generate": _group(everywhere[half:], ["rollout"], on_gpus),
        }
    return [
        f"actor.zero_stage={stage}",
        f"rollout.tensor_parallel={engine}",
        "groups=null",
        f"groups={json.dumps(groups)}",
    ]


def _group(devices: list[int], roles: list[Role], on_gpus: bool) -> dict[str, Any]:
    return ({"gpus": devices} if on_gpus else {"ranks": len(devices)}) | {"roles": roles}
