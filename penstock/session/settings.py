"""The values that may change during a run, resolved for one iteration: schedules first, then live overrides.

Live overrides are a Prefect Variable of the run, there from its start on: a JSON object of dotted keys, empty at first.
`penstock set RUN key=value` and the Prefect UI change it; null takes one key back. They pass the same validation as a
recipe; a bad one is reported and changes nothing. They are read when an iteration ends, for the next one, and are part
of the progress from then on. A run that completes deletes its Variable. A run that ends otherwise leaves it for its
resume, and a new run in the same folder begins with an empty Variable.

A training that runs out of memory sets one by itself: a smaller budget of micro-batches (`smaller_micro_batches`).

Those in force at an iteration are among its figures, as `live/<key>`, so that it can be replayed with them.

The KL coefficient of the next iteration: fixed, or adapted to the divergence just observed.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.variables import Variable

from penstock.algorithms.kl import AdaptiveKL
from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.schedule import value_at
from penstock.engines.commands.forward import Logprobs, Values
from penstock.engines.commands.logprob_gap import LogprobsToCompare
from penstock.engines.commands.message import name_of
from penstock.engines.commands.reference import LogprobsAndKl, ReferenceStates
from penstock.engines.commands.update import SumGradient, UpdateActor, UpdateCritic
from penstock.session.session import Training, read_config
from penstock.state.manifest import Progress, check_kind, completed
from penstock.state.run_folder import RunFolder, read_metrics

LIVE_KEYS = (
    "actor.optimizer.learning_rate",
    "actor.micro_batch_tokens",
    "critic.optimizer.learning_rate",
    "critic.micro_batch_tokens",
    "algorithm.entropy_coefficient",
    "algorithm.kl.coefficient",
    "rollout.temperature",
)

OF_ACTOR = (Logprobs, LogprobsAndKl, LogprobsToCompare, ReferenceStates, SumGradient, UpdateActor)
ACTOR_BUDGET, CRITIC_BUDGET = "actor.micro_batch_tokens", "critic.micro_batch_tokens"
BUDGETS = {  # by the command that keeps to it
    **dict.fromkeys(map(name_of, OF_ACTOR), ACTOR_BUDGET),
    **dict.fromkeys(map(name_of, (UpdateCritic, Values)), CRITIC_BUDGET),
}

LIVE = "live/"  # before a key that was overridden, as the name of a figure

ALGORITHM_SETTINGS = "algorithm.settings."  # before the name of each number in `algorithm.settings`, live as well

ADAPTIVE_KEY = "algorithm.kl.coefficient"  # with a target the controller sets it, iteration by iteration


@dataclass(frozen=True)
class Settings:
    """Values in force at one iteration."""

    iteration: int
    temperature: float
    learning_rate: float
    critic_learning_rate: float
    algorithm: Mapping[str, Any]  # the whole of `algorithm.settings`, schedules resolved
    entropy_coefficient: float
    kl_coefficient: float
    micro_batch_tokens: int
    critic_micro_batch_tokens: int


def variable_name(run: RunFolder) -> str:
    """Return the name of the run's Prefect Variable: `penstock-live-`, its folder's name, six digits of a path's hash.

    The digits tell folders of one name apart. Lower case letters, digits, dashes and underscores, at
    most 255, as Prefect asks.
    """
    path = run.path.resolve()
    readable = re.sub(r"[^a-z0-9_-]", "-", path.name.lower())[:200]
    return f"penstock-live-{readable}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def variable_to_set(run: RunFolder) -> str:
    """Return `variable_name` of a run that will still read the Variable.

    Raises:
        UserError: the run is complete, or no training that reads one.
    """
    check_kind(run, "train")
    if completed(run, read_config(run).iterations):
        raise UserError(f"{run.path} is complete, nothing will read this", "name the folder of a running training")
    return variable_name(run)


def offer_overrides(run: RunFolder, overrides: dict[str, Any] | None = None) -> None:
    """Make the run's Variable with the overrides in force.

    A resume keeps the Variable that its earlier attempt left, and makes one where that attempt had another server.

    Args:
        overrides: those in force; None: the run is new, and a Variable that is there belongs to another run.
    """
    name = variable_name(run)
    if overrides is None or Variable.get(name, default=None) is None:
        Variable.set(name, overrides or {}, overwrite=True)


def live_keys(config: TrainConfig) -> tuple[str, ...]:
    """Return the keys that may change during a training, those of its algorithm's settings among them."""
    return (*LIVE_KEYS, *(ALGORITHM_SETTINGS + name for name in sorted(config.algorithm.scheduled)))


def page_of_overrides(run: RunFolder, config: TrainConfig) -> str:
    """Return what the page of the training in Prefect says of its live overrides, in Markdown."""
    tree = config.model_dump(mode="json")
    keys = "\n".join(f"- `{key}`" for key in live_keys(config) if _place_of(key, tree) is not None)
    return (
        f"The Variable `{variable_name(run)}` changes this training from its next iteration on: an object such as "
        f'`{{"rollout.temperature": 0.9}}`, of keys that this training has:\n\n{keys}\n'
    )


def apply_overrides(config: TrainConfig, overrides: dict[str, Any]) -> TrainConfig:
    """Return `config` with live overrides applied and validated; one that is null is taken back.

    Raises:
        UserError: a key cannot change during a run, or a value is not allowed.
    """
    if not isinstance(overrides, dict):
        raise UserError(f"{overrides!r} is no object of keys", 'for example {"rollout.temperature": 0.9}')
    tree, live = config.model_dump(mode="json"), live_keys(config)
    for key, value in overrides.items():
        if key not in live:
            can = [name for name in live if _place_of(name, tree) is not None]
            raise UserError(f"'{key}' cannot change during this run", f"keys that can: {', '.join(can)}")
        place = _place_of(key, tree)
        if place is None:
            raise UserError(f"'{key}' has no effect in this run", "remove it")
        if value is not None:
            place[key.rpartition(".")[2]] = value
    return config_from_mapping(tree, "live overrides")


def _place_of(key: str, tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section of a configuration's tree in which a live key is; None: the key has no effect in the run."""
    place: Any = tree
    for name in key.split(".")[:-1]:
        place = place[name] if place is not None else None
    if place is None or (key == ADAPTIVE_KEY and place["target"] is not None):
        return None
    found: dict[str, Any] = place
    return found


def live_figures(training: Training, progress: Progress) -> dict[str, float]:
    """Return what live overrides set at the iteration after `progress`, schedules resolved, as `live/<key>`."""
    overrides = {key: value for key, value in (progress.overrides or {}).items() if value is not None}
    if not overrides:
        return {}
    tree: Any = apply_overrides(training.config, overrides).model_dump()
    values: dict[str, Any] = {key: functools.reduce(operator.getitem, key.split("."), tree) for key in overrides}
    return {LIVE + key: float(value_at(value, progress.iteration + 1)) for key, value in values.items()}


def live_overrides_in(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the overrides that an iteration with these figures was run with."""
    return {name.removeprefix(LIVE): value for name, value in figures.items() if name.startswith(LIVE)}


@task(task_run_name="live-overrides-{progress.iteration:06d}", cache_policy=NO_CACHE)
def live_overrides(training: Training, progress: Progress) -> Progress:
    """Return `progress` with the overrides that hold from its next iteration on, if there is one."""
    if progress.iteration == training.config.iterations:
        return progress
    name = variable_name(training.run)
    wanted: Any = Variable.get(name, default=None)
    if wanted is None or wanted == (progress.overrides or {}):
        return progress
    try:
        apply_overrides(training.config, wanted)
    except UserError as error:
        get_run_logger().error("the Variable %s is refused, the run goes on as before: %s", name, error)
        return progress
    get_run_logger().warning("live overrides from iteration %d: %s", progress.iteration + 1, wanted)
    return progress.advanced(overrides=wanted)


def smaller_micro_batches(training: Training, command: str) -> tuple[str, int] | None:
    """Halve the budget of micro-batches that a command had no memory for, from the iteration on that is repeated.

    It is a live override like a person's: shown, kept by a resume, and taken back by `penstock set`.

    Returns the key and its new value; None: the command has no budget that may change, or the budget in force is the
    longest row's already, which cannot be split.
    """
    config = training.config
    key = BUDGETS.get(command)
    if key is None or training.session().kind != "train":
        return None
    name, in_force = variable_name(training.run), training.session().overrides
    done = max((record["iteration"] for record in read_metrics(training.run)), default=0)

    def budget(overrides: Any) -> int:
        trainer = getattr(apply_overrides(config, overrides), key.partition(".")[0])
        tokens: int = value_at(trainer.budget, done + 1)
        return tokens

    tokens, longest = budget(in_force), config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if tokens <= longest:
        return None
    smaller, asked = max(tokens // 2, longest), Variable.get(name, default=None)
    asked = in_force if asked is None else asked
    try:
        smaller = min(smaller, budget(asked))  # a person may have set one meanwhile
    except UserError:  # as it was refused when it was read
        asked = in_force
    Variable.set(name, asked | {key: smaller}, overwrite=True)
    return key, smaller


def forget_overrides(run: RunFolder) -> None:
    """Delete the Variable of a run that is complete."""
    Variable.unset(variable_name(run))


def next_settings(training: Training, progress: Progress) -> Settings:
    """Return the values in force at the iteration after `progress`."""
    training.session().overrides = progress.overrides or {}
    return settings_at(apply_overrides(training.config, progress.overrides or {}), progress.iteration + 1, progress)


def settings_at(config: TrainConfig, iteration: int, progress: Progress) -> Settings:
    """Return the values in force at `iteration` by the schedules of `config`; a pure function."""
    algorithm, actor = config.algorithm, config.actor
    critic = config.critic or actor
    kl = algorithm.kl
    coefficient = 0.0 if kl is None else float(value_at(kl.coefficient, iteration))
    if kl is not None and kl.target is not None and progress.kl_coefficient is not None:
        coefficient = progress.kl_coefficient
    return Settings(
        iteration=iteration,
        temperature=value_at(config.rollout.temperature, iteration),
        learning_rate=value_at(actor.optimizer.learning_rate, iteration),
        critic_learning_rate=value_at(critic.optimizer.learning_rate, iteration),
        algorithm=algorithm.settings_at(iteration),
        entropy_coefficient=value_at(algorithm.entropy_coefficient, iteration),
        kl_coefficient=coefficient,
        micro_batch_tokens=value_at(actor.budget, iteration),
        critic_micro_batch_tokens=value_at(critic.budget, iteration),
    )


def next_kl_coefficient(training: Training, settings: Settings, metrics: dict[str, float]) -> float | None:
    """Return the coefficient to use next and record the one used; None without an adaptive controller."""
    kl = training.config.algorithm.kl
    if kl is None:
        return None
    metrics["kl/coefficient"] = settings.kl_coefficient
    if kl.target is None or kl.horizon is None or kl.ceiling is None:
        return None
    # No step was taken and no pass gave both log-probs, or what they gave says nothing.
    if not math.isfinite(metrics.get("actor/kl", math.nan)):
        return settings.kl_coefficient
    controller = AdaptiveKL(settings.kl_coefficient, kl.target, kl.horizon, kl.ceiling)
    samples = training.config.rollout.prompts * training.config.rollout.samples * training.config.conversations
    return controller.update(metrics["actor/kl"], samples).coefficient
