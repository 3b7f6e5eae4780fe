"""Advantage: rewards become what each token is worth, by the pure functions of penstock/algorithms/."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.settings import arguments
from penstock.algorithms.kl import kl_estimate
from penstock.algorithms.registry import advantage_named, is_own
from penstock.algorithms.segments import lengths, segment_sum
from penstock.algorithms.value_losses import explained_variance
from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.sections.algorithm import AlgorithmConfig
from penstock.session.rollout.refused_groups import PART, judged_columns, refused_groups
from penstock.session.session import Stage, Training, may_help_again, timed
from penstock.session.settings import Settings
from penstock.state.experience import AGENT, add_columns, column_names, drop_experience, read_columns
from penstock.tasks.iteration.forward_passes import ColumnRef
from penstock.tasks.iteration.greedy_baseline import GREEDY_REWARD
from penstock.tasks.iteration.reward import OVERLONG
from penstock.tasks.iteration.rollout import ROLLOUT_LOGPROBS
from penstock.usercode.guard import reason_of

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
    with timed(training, metrics, "advantage"):
        algorithm = training.config.algorithm
        columns: dict[str, Any] = {}
        for part in passes:
            if part.columns:  # other passes wrote nothing that is taken in here
                columns |= read_columns(part.path, part.columns)
        if algorithm.ratio_to_rollout:
            columns["logprobs_old"] = read_columns(path, [ROLLOUT_LOGPROBS])[ROLLOUT_LOGPROBS]
        inputs = _inputs(path, columns, algorithm, settings.kl_coefficient)
        result = _estimate(inputs, algorithm.functions[0], settings.algorithm)
        if algorithm.dynamic_sampling is not None:
            refused_G = refused_groups(training, judged_columns(path))
            refused_B = np.repeat(refused_G, training.config.rollout.samples)
            result = without(result, refused_B, inputs.offsets_B1)
            columns["refused"] = refused_B.astype(np.uint8)
            metrics["rollout/groups_refused"] = float(refused_G.sum())
        columns |= _as_columns(result, inputs.offsets_B1)
        add_columns(path, columns)
        for part in passes:
            if part.columns:
                drop_experience(Path(part.path))
    figures = _figures(inputs, result, columns, training.config.agents)
    return Stage(stage.experience, metrics | figures | _seconds(passes))


def _inputs(path: Path, columns: dict[str, Any], algorithm: AlgorithmConfig, kl_coefficient: float) -> AdvantageInputs:
    greedy = [GREEDY_REWARD] if "greedy" in algorithm.needs else []
    parts = _part_columns(path, algorithm) if "reward_parts" in algorithm.needs else []
    agents = [AGENT] if "agent" in algorithm.needs else []
    base = read_columns(path, ["reward", "group", "loss_mask", *greedy, *parts, *agents])
    mask: Ragged = base["loss_mask"]
    token_rewards_T = np.zeros(len(mask.values_T))
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        token_rewards_T = -kl_coefficient * _kl(columns, algorithm.kl.estimator)
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
        agents_B=base.get(AGENT),
    )


def _kl(columns: dict[str, Any], estimator: str) -> np.ndarray:
    """KL to the reference per token: over the vocabulary where a pass has computed it, else estimated."""
    if "kl" in columns:
        full_T: np.ndarray = columns["kl"].values_T
        return full_T
    return kl_estimate(columns["logprobs_old"].values_T, columns["logprobs_reference"].values_T, estimator)


def _part_columns(path: Path, algorithm: AlgorithmConfig) -> list[str]:
    """Return the columns of the reward's parts.

    Raises:
        UserError: there are none, or none of a name that has a weight.
    """
    # A part `reward` is the total that the function gave beside its parts.
    parts = [name for name in column_names(path) if name.startswith(PART) and name != f"{PART}reward"]
    known = ", ".join(name.removeprefix(PART) for name in parts)
    for name in algorithm.settings.get("part_weights") or ():
        if PART + name not in parts:
            raise UserError(
                f"'algorithm.settings.part_weights' names '{name}', which is no part of the reward", f"one of: {known}"
            )
    if not set(parts) - {PART + OVERLONG}:
        raise UserError(
            f"advantage '{algorithm.functions[0]}' needs rewards of several parts, and the reward function gives none",
            "let it return a dictionary of its parts, or use another algorithm",
        )
    return parts


def _estimate(inputs: AdvantageInputs, name: str, values: Mapping[str, Any]) -> Advantages:
    estimator = advantage_named(name)
    given = arguments(estimator, values)
    if is_own(name):
        result = _of_users(name, estimator, inputs, given)
        check_advantages(name, inputs, result)
    else:
        result = estimator(inputs, **given)
    check_finite(name, inputs, result)
    return result


def _of_users(name: str, estimator: Callable[..., Any], inputs: AdvantageInputs, given: Mapping[str, Any]) -> Any:
    """Return what a user's estimator returns.

    Raises:
        UserError: it raised.
    """
    try:
        return estimator(inputs, **given)
    except Exception as error:
        raise UserError(f"advantage '{name}' raised {reason_of(error, __file__)}", "put the function right") from error


def check_advantages(name: str, inputs: AdvantageInputs, result: object) -> None:
    """Check what a user's estimator returned, before anything is learnt from it.

    Raises:
        UserError: it is not `Advantages` of arrays in float32, one per token.
    """
    what = f"advantage '{name}' returned"
    remedy = "see 'An algorithm of your own' in docs/algorithms.md"
    if not isinstance(result, Advantages):
        raise UserError(f"{what} {type(result).__name__}, not penstock.algorithms.advantages.types.Advantages", remedy)
    tokens, rows = inputs.mask_T.shape, inputs.rewards_B.shape
    columns = {
        "advantages_T": (result.advantages_T, tokens),
        "returns_T": (result.returns_T, tokens),
        "accepted_B": (result.accepted_B, rows),
    }
    given = {column: found for column, found in columns.items() if found[0] is not None or column == "advantages_T"}
    for column, (values, shape) in given.items():
        if not isinstance(values, np.ndarray):
            raise UserError(f"{what} {column} of type {type(values).__name__}, not an array of numpy", remedy)
        if values.shape != shape:
            raise UserError(f"{what} {column} of shape {values.shape}, not {shape}", remedy)
    if result.advantages_T.dtype != np.float32:
        raise UserError(f"{what} advantages_T in {result.advantages_T.dtype}, not float32", remedy)


def check_finite(name: str, inputs: AdvantageInputs, result: Advantages) -> None:
    """Check that advantages and returns are finite before anything is learnt from them.

    Raises:
        UserError: an advantage, or a return for the critic, is NaN or infinite.
    """
    for column, values_T in (("advantages", result.advantages_T), ("returns", result.returns_T)):
        if values_T is not None and not np.isfinite(values_T).all():
            low, high = inputs.rewards_B.min(), inputs.rewards_B.max()
            raise UserError(
                f"advantage '{name}' made {column} that are not finite numbers in float32, of rewards from {low:g} to "
                f"{high:g}",
                "look at the rewards, and at the critic's values and the KL where there are any",
            )


def without(result: Advantages, refused_B: np.ndarray, offsets_B1: np.ndarray) -> Advantages:
    """Learn nothing from refused rows: advantage 0, and not accepted where an estimator accepts rows.

    Their tokens stay in the divisor of the loss, as those of a group of equal rewards do: how many groups are refused
    does not change what the others weigh.
    """
    kept_T = np.repeat(~refused_B, lengths(offsets_B1))
    accepted_B = None if result.accepted_B is None else result.accepted_B & ~refused_B
    return dataclasses.replace(result, advantages_T=result.advantages_T * kept_T, accepted_B=accepted_B)


def _as_columns(result: Advantages, offsets_B1: np.ndarray) -> dict[str, Any]:
    columns: dict[str, Any] = {"advantages": Ragged(result.advantages_T, offsets_B1)}
    if result.returns_T is not None:
        columns["returns"] = Ragged(result.returns_T, offsets_B1)
    if result.accepted_B is not None:
        columns["accepted"] = result.accepted_B.astype(np.uint8)
    return columns


def advantage_figures(training: Training, settings: Settings, path: Path) -> dict[str, float]:
    """Return the figures of experience that has its advantages, and the columns of the forward passes."""
    algorithm, present = training.config.algorithm, column_names(path)
    names = ("values", "logprobs_old", "logprobs_reference", "advantages", "returns")
    columns = read_columns(path, [name for name in names if name in present])
    returns = columns["returns"].values_T if "returns" in columns else None
    inputs = _inputs(path, columns, algorithm, settings.kl_coefficient)
    return _figures(inputs, Advantages(columns["advantages"].values_T, returns), columns, training.config.agents)


def _figures(
    inputs: AdvantageInputs, result: Advantages, columns: dict[str, Any], agents: Sequence[str]
) -> dict[str, float]:
    counted = inputs.mask_T > 0
    figures = _spread(inputs, result)
    if "kl" in columns or {"logprobs_reference", "logprobs_old"} <= columns.keys():
        kl_T = _kl(columns, "k3")
        figures["actor/kl"] = float(kl_T[counted].mean()) if counted.any() else 0.0
    if inputs.values_T is not None and result.returns_T is not None:
        figures |= _explained(inputs, inputs.values_T, result.returns_T, agents)
    return figures


def _explained(
    inputs: AdvantageInputs, values_T: np.ndarray, returns_T: np.ndarray, agents: Sequence[str]
) -> dict[str, float]:
    """How much of the returns the critics explain, and how much of an agent's returns its own critic does."""
    figures = {"critic/explained_variance": explained_variance(values_T, returns_T, inputs.mask_T)}
    for number, agent in enumerate(agents):
        own_T = np.repeat(inputs.agents_B == number, lengths(inputs.offsets_B1))
        name = f"critic/{agent}/explained_variance"
        figures[name] = explained_variance(values_T, returns_T, inputs.mask_T * own_T)
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
