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
from algorithms.kl import kl_estimate
from algorithms.registry import ALGORITHMS
from algorithms.value_losses import explained_variance
from configs.schema import AlgorithmConfig
from state.experience import Ragged, add_columns, read_columns
from tasks.logprobs import ColumnRef
from tasks.session import Stage, Training, timed
from tasks.settings import Settings


@task(task_run_name="advantage-{settings.iteration:06d}", cache_policy=NO_CACHE, retries=1)
def advantage(training: Training, settings: Settings, stage: Stage, passes: Sequence[ColumnRef]) -> Stage:
    """Compute advantages (and returns) and add them, with the columns of the forward passes, to the experience."""
    metrics = dict(stage.metrics)
    path = Path(stage.experience.path)
    with timed(metrics, "advantage"):
        algorithm = training.config.algorithm
        columns: dict[str, Any] = {part.name: read_columns(part.path, [part.name])[part.name] for part in passes}
        base = read_columns(path, ["reward", "group", "loss_mask"])
        inputs = _inputs(base, columns, algorithm, settings.kl_coefficient)
        result = _estimate(inputs, algorithm)
        columns |= _as_columns(result, inputs.offsets_B1)
        add_columns(path, columns)
        for part in passes:
            Path(part.path).unlink(missing_ok=True)
    return Stage(stage.experience, metrics | _figures(inputs, result, columns) | _seconds(passes))


def _inputs(
    base: dict[str, Any], columns: dict[str, Any], algorithm: AlgorithmConfig, kl_coefficient: float
) -> AdvantageInputs:
    mask: Ragged = base["loss_mask"]
    token_rewards_T = np.zeros(len(mask.values_T))
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        old_T, reference_T = columns["logprobs_old"].values_T, columns["logprobs_reference"].values_T
        token_rewards_T = -kl_coefficient * kl_estimate(old_T, reference_T, algorithm.kl.estimator)
    values = columns.get("values")
    return AdvantageInputs(
        rewards_B=base["reward"],
        token_rewards_T=token_rewards_T,
        mask_T=mask.values_T,
        offsets_B1=mask.offsets_B1,
        groups_B=base["group"],
        values_T=None if values is None else values.values_T,
    )


def _estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    algorithm = ALGORITHMS[config.name]
    settings = {name: getattr(config, name) for name in algorithm.advantage_settings}
    return ADVANTAGES[algorithm.advantage](inputs, **settings)


def _as_columns(result: Advantages, offsets_B1: np.ndarray) -> dict[str, Ragged]:
    columns = {"advantages": Ragged(result.advantages_T, offsets_B1)}
    if result.returns_T is not None:
        columns["returns"] = Ragged(result.returns_T, offsets_B1)
    return columns


def _figures(inputs: AdvantageInputs, result: Advantages, columns: dict[str, Any]) -> dict[str, float]:
    counted = inputs.mask_T > 0
    figures: dict[str, float] = {}
    if "logprobs_reference" in columns and "logprobs_old" in columns:
        kl_T = kl_estimate(columns["logprobs_old"].values_T, columns["logprobs_reference"].values_T, "k3")
        figures["actor/kl"] = float(kl_T[counted].mean()) if counted.any() else 0.0
    if inputs.values_T is not None and result.returns_T is not None:
        figures["critic/explained_variance"] = explained_variance(inputs.values_T, result.returns_T, inputs.mask_T)
    return figures


def _seconds(passes: Sequence[ColumnRef]) -> dict[str, float]:
    return {f"time/{part.name}_s": part.seconds for part in passes}
