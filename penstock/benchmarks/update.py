"""Seconds of the actor's update alone, on an experience file made up for it; the critic's on request.

Loss, gradient norm and entropy of every step are kept: data and order are fixed, so two builds can be compared number
by number. (On-policy the loss is the mean advantage whatever the weights; the other two show them.)

Left out: how experience comes about; a recipe with old or reference log-probs gets the actor's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, device_count, groups_of, load_roles, settings_of
from penstock.benchmarks.workload.experience import UNVERIFIED, Lengths, write_experience
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import ModelShape
from penstock.session.session import Stage, Training
from penstock.state.experience import ExperienceRef, add_columns, read_columns
from penstock.tasks.iteration.forward_passes import old_logprobs
from penstock.tasks.iteration.update import update_actor, update_critic

FIGURES = {
    "update_s": "time/update_actor_s",
    "critic_update_s": "time/update_critic_s",
    "mfu": "actor/mfu",
    "critic_mfu": "critic/mfu",
    "communication_share": "actor/communication_share",
}
KEPT = ("loss", "grad_norm", "entropy", "learning_rate", "mfu")


def measure(config: TrainConfig, lengths: Lengths, command: str, *, steps: int, skip: int, critic: bool) -> BenchResult:
    """Update `steps` times on the same rows; return the medians after the first `skip`.

    Raises:
        UserError: a setting does not fit the model, the devices or the algorithm.
    """
    steady(range(steps), skip)
    if critic and not config.algorithm.needs_critic:
        raise UserError(
            f"algorithm '{config.algorithm.name}' has no critic", "remove --critic, or add algorithm.name=ppo"
        )
    if config.algorithm.full_kl:
        raise UserError(
            "'algorithm.kl.estimator: full' needs the states of a reference, which is not loaded here",
            "name another estimator, or measure whole steps with 'penstock bench step'",
        )
    roles: tuple[Role, ...] = ("actor", "critic") if critic else ("actor",)
    longest = int((lengths.prompts_B + lengths.responses_B).max())
    config = config.model_copy(update={"iterations": steps})
    with groups_of(config) as (training, progress):
        shape = load_roles(training, roles)
        _require_positions(longest, shape)
        experience = made_up_experience(training, lengths, shape, 0, UNVERIFIED)
        session = training.session()
        decided = {
            "recomputed": {name: str(value) for name, value in session.recomputed.items()},
            "attention": session.engine_figures["attention"],
        }
        progress.start(steps)
        rows = []
        for number in range(1, steps + 1):
            rows.append(_update(training, experience, number, critic))
            progress.advance(number, rows[-1])
    counted = steady(rows, skip)
    figures = medians(counted, FIGURES)
    figures["tokens_per_s_per_gpu"] = (
        lengths.tokens * config.algorithm.epochs / figures["update_s"] / device_count(config, "actor")
    )
    if peaks := [row["memory/gpu_gib"] for row in rows if "memory/gpu_gib" in row]:
        figures["peak_gib"] = max(peaks)
    return new_result(
        "update",
        command,
        figures,
        settings={"steps": steps, "skipped": skip} | decided | lengths.describe() | describe(config),
        details=[{"step": number, **_detail(row)} for number, row in enumerate(rows, start=1)],
    )


def _require_positions(longest: int, shape: ModelShape) -> None:
    if longest > shape.positions:
        raise UserError(
            f"the longest row has {longest} tokens, the model has {shape.positions} positions",
            "lower data.max_prompt_tokens, rollout.max_response_tokens or the longest of --lengths",
        )


def made_up_experience(
    training: Training, lengths: Lengths, shape: ModelShape, iteration: int, version: int
) -> ExperienceRef:
    """Write the experience, with the actor's own log-probs where the recipe's loss reads any."""
    config = training.config
    path = training.run.experience(iteration)
    experience = write_experience(path, lengths, shape.vocabulary, version, config.rollout.samples)
    kl_in_loss = config.algorithm.kl is not None and config.algorithm.kl.place == "loss"
    wanted = ["logprobs_old"] * (config.old_logprobs_needed or config.algorithm.ratio_to_rollout)
    wanted += ["logprobs_reference"] * kl_in_loss + ["logprobs_rollout"] * (config.algorithm.correction is not None)
    if wanted:
        training.session().say("log-probs of the experience")
        part = old_logprobs.fn(training, settings_of(config, iteration), experience)
        column = read_columns(part.path, [part.name])[part.name]
        add_columns(path, dict.fromkeys(wanted, column))
        Path(part.path).unlink()
    return experience


def _update(training: Training, experience: ExperienceRef, number: int, critic: bool) -> dict[str, float]:
    settings, stage = settings_of(training.config, number), Stage(experience, {})
    row = update_critic.fn(training, settings, stage) if critic else {}
    # The actor's figures come last: their memory is the most of both commands.
    return row | update_actor.fn(training, settings, stage)


def _detail(row: dict[str, float]) -> dict[str, Any]:
    names = [f"{role}/{name}" for role in ("actor", "critic") for name in KEPT]
    detail = {name: row[name] for name in ("time/update_actor_s", "time/update_critic_s", *names) if name in row}
    return {name: value if np.isfinite(value) else None for name, value in detail.items()}
