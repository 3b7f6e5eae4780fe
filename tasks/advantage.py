"""Advantage: rewards become what each token is worth, by the pure functions of algorithms/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from algorithms.advantages import ADVANTAGES
from algorithms.advantages.types import AdvantageInputs, Advantages
from algorithms.discovery import settings as settings_of
from algorithms.kl import kl_estimate
from algorithms.segments import segment_sum
from algorithms.value_losses import explained_variance
from configs.algorithm import AlgorithmConfig
from configs.errors import UserError
from state.experience import Ragged, add_columns, column_names, read_columns
from tasks.greedy_baseline import GREEDY_REWARD
from tasks.logprobs import ColumnRef
from tasks.reward import OVERLONG
from tasks.session import Stage, Training, may_help_again, timed
from tasks.settings import Settings

PART = "reward/"  # columns of the parts of a reward
SILENCE = 1e-9  # a response whose advantages add up to less teaches nothing


@task(
    task_run_name="advantage-{settings.iteration:06d}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_condition_fn=may_help_again,
)
def advantage(training: Training, settings: Settings, stage: Stage, passes: Sequence[ColumnRef]) -> Stage:
    """Compute advantages (and returns) and add them, with the columns of the forward passes, to the experience."""
    metrics = dict(stage.metrics)
    path = Path(stage.experience.path)
    with timed(metrics, "advantage"):
        algorithm = training.config.algorithm
        columns: dict[str, Any] = {part.name: read_columns(part.path, [part.name])[part.name] for part in passes}
        inputs = _inputs(path, columns, algorithm, settings.kl_coefficient)
        result = _estimate(inputs, algorithm)
        columns |= _as_columns(result, inputs.offsets_B1)
        add_columns(path, columns)
        for part in passes:
            Path(part.path).unlink(missing_ok=True)
    return Stage(stage.experience, metrics | _figures(inputs, result, columns) | _seconds(passes))


def _inputs(path: Path, columns: dict[str, Any], algorithm: AlgorithmConfig, kl_coefficient: float) -> AdvantageInputs:
    greedy = [GREEDY_REWARD] if "greedy" in algorithm.needs else []
    parts = _part_columns(path, algorithm) if "reward_parts" in algorithm.needs else []
    base = read_columns(path, ["reward", "group", "loss_mask", *greedy, *parts])
    mask: Ragged = base["loss_mask"]
    token_rewards_T = np.zeros(len(mask.values_T))
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        old_T, reference_T = columns["logprobs_old"].values_T, columns["logprobs_reference"].values_T
        token_rewards_T = -kl_coefficient * kl_estimate(old_T, reference_T, algorithm.kl.estimator)
    values, old = columns.get("values"), columns.get("logprobs_old")
    return AdvantageInputs(
        rewards_B=base["reward"],
        token_rewards_T=token_rewards_T,
        mask_T=mask.values_T,
        offsets_B1=mask.offsets_B1,
        groups_B=base["group"],
        values_T=None if values is None else values.values_T,
        old_logprobs_T=None if old is None else old.values_T,
        baselines_B=base.get(GREEDY_REWARD),
        parts_B={name.removeprefix(PART): base[name] for name in parts},
    )


def _part_columns(path: Path, algorithm: AlgorithmConfig) -> list[str]:
    """Return the columns of the reward's parts.

    Raises:
        UserError: there are none, or none of a name that has a weight.
    """
    # A part `reward` is the total that the function gave beside its parts.
    parts = [name for name in column_names(path) if name.startswith(PART) and name != f"{PART}reward"]
    known = ", ".join(name.removeprefix(PART) for name in parts)
    for name in algorithm.part_weights or ():
        if PART + name not in parts:
            raise UserError(
                f"'algorithm.part_weights' names '{name}', which is no part of the reward", f"one of: {known}"
            )
    if not set(parts) - {PART + OVERLONG}:
        raise UserError(
            f"advantage '{algorithm.functions[0]}' needs rewards of several parts, and the reward function gives none",
            "let it return a dictionary of its parts, or use another algorithm",
        )
    return parts


def _estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    estimator = ADVANTAGES[config.functions[0]]
    return estimator(inputs, **{name: getattr(config, name) for name in settings_of(estimator)})


def _as_columns(result: Advantages, offsets_B1: np.ndarray) -> dict[str, Ragged]:
    columns = {"advantages": Ragged(result.advantages_T, offsets_B1)}
    if result.returns_T is not None:
        columns["returns"] = Ragged(result.returns_T, offsets_B1)
    return columns


def _figures(inputs: AdvantageInputs, result: Advantages, columns: dict[str, Any]) -> dict[str, float]:
    counted = inputs.mask_T > 0
    figures = _spread(inputs, result)
    if "logprobs_reference" in columns and "logprobs_old" in columns:
        kl_T = kl_estimate(columns["logprobs_old"].values_T, columns["logprobs_reference"].values_T, "k3")
        figures["actor/kl"] = float(kl_T[counted].mean()) if counted.any() else 0.0
    if inputs.values_T is not None and result.returns_T is not None:
        figures["critic/explained_variance"] = explained_variance(inputs.values_T, result.returns_T, inputs.mask_T)
    return figures


def _spread(inputs: AdvantageInputs, result: Advantages) -> dict[str, float]:
    """Mean and spread over counted tokens, and the share of rows from which nothing is learnt."""
    counted_T = result.advantages_T[inputs.mask_T > 0].astype(np.float64)
    if not counted_T.size:
        return {}
    size_B = segment_sum(np.abs(result.advantages_T), inputs.offsets_B1)
    # Normalising a group's exact 0 over the batch may leave a rounding error of it.
    silent_B = size_B[segment_sum(inputs.mask_T, inputs.offsets_B1) > 0] < SILENCE
    return {
        "advantage/mean": float(counted_T.mean()),
        "advantage/std": float(counted_T.std()),
        "advantage/zero_share": float(silent_B.mean()),
    }


def _seconds(passes: Sequence[ColumnRef]) -> dict[str, float]:
    return {f"time/{part.name}_s": part.seconds for part in passes}
