"""Update the actor and the critic: all optimizer steps of one iteration on its experience."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.algorithms.declarations.settings import arguments
from penstock.algorithms.registry import choice_named, policy_loss_named
from penstock.configs.sections.algorithm import AlgorithmConfig
from penstock.engines.commands.update import ActorLoss, Split, StepActor, UpdateActor, UpdateCritic
from penstock.session.figures import role_figures, slowest
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings
from penstock.tasks.iteration.forward_passes import states_path

NOTHING: Mapping[str, float] = MappingProxyType({})


@task(task_run_name="update-actor-{settings.iteration:06d}", cache_policy=NO_CACHE)
def update_actor(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Train the actor; return its metrics. Where its gradient is summed already (tasks/stream), take the step."""
    algorithm = training.config.algorithm
    if training.config.rollout.in_portions:
        before = {name: stage.metrics[name] for name in ("time/update_actor_s",) if name in stage.metrics}
        key = f"{settings.iteration}/update_actor/step"
        return updated(training, "actor", _step(training, settings), key, before) | trained_tokens(training, stage)
    states = states_path(stage.experience) if algorithm.full_kl and algorithm.kl_in_loss else None
    command = UpdateActor(
        path=stage.experience.path,
        version=stage.experience.policy_version,
        split=split(training, settings.iteration, settings.micro_batch_tokens),
        loss=actor_loss(algorithm, settings),
        learning_rate=settings.learning_rate,
        states=None if states is None else str(states),
    )
    metrics = updated(training, "actor", command, f"{settings.iteration}/update_actor")
    if states is not None:
        states.unlink()
    return metrics | trained_tokens(training, stage)


def trained_tokens(training: Training, stage: Stage) -> dict[str, float]:
    """Return how many response tokens the actor's update was over, each as often as it was passed."""
    return {"actor/tokens": float(stage.experience.response_tokens * training.config.algorithm.epochs)}


def _step(training: Training, settings: Settings) -> StepActor:
    aggregation = training.config.algorithm.aggregation
    assert aggregation is not None
    return StepActor(aggregation, training.config.rollout.max_response_tokens, settings.learning_rate)


def actor_loss(algorithm: AlgorithmConfig, settings: Settings) -> ActorLoss:
    """Return the actor's loss at an iteration.

    Args:
        algorithm: the recipe's section, from which come the functions and what never changes in a run.
        settings: the values in force, from which come all numbers that a schedule or a live override may change; those
            of the functions are `settings.algorithm`, and each function gets the ones that its signature names.
    """
    _, policy_loss = algorithm.functions
    choice, kl = choice_named(policy_loss), algorithm.kl
    return ActorLoss(
        policy_loss=policy_loss,
        settings=arguments(policy_loss_named(policy_loss), settings.algorithm),
        choice_settings={} if choice is None else arguments(choice, settings.algorithm),
        temperature=settings.temperature,
        entropy_coefficient=settings.entropy_coefficient,
        kl_estimator=kl.estimator if kl is not None and algorithm.kl_in_loss else None,
        kl_coefficient=settings.kl_coefficient,
        correction=None if algorithm.correction is None else algorithm.correction.in_force,
        router_loss_coefficient=algorithm.router_loss_coefficient,
    )


def updated(
    training: Training,
    role: Literal["actor", "critic"],
    command: UpdateActor | StepActor | UpdateCritic,
    key: str,
    before: Mapping[str, float] = NOTHING,
) -> dict[str, float]:
    """Train the model of `role` on the experience; return its metrics.

    Args:
        before: the seconds that the update has taken so far.
    """
    metrics = dict(before)
    session, used = training.session(), "/".join(key.split("/")[:2])
    session.say("update")
    with timed(training, metrics, f"update_{role}"):
        replies = session.call(role, command, key)
    # The task's seconds hold the wait for the other update too, where actor and critic share a group.
    metrics[f"{role}/update_s"] = slowest(session.usage[used])
    return metrics | named(role, replies[0].metrics) | role_figures(training, role, used)


def split(training: Training, iteration: int, micro_batch_tokens: int) -> Split:
    """Return how this iteration's experience is cut into optimizer steps and micro-batches."""
    config = training.config
    assert config.algorithm.aggregation is not None
    return Split(
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
        samples=config.rollout.samples,
        together=config.rollout.samples if config.algorithm.mini_batch_of == "prompts" else 1,
        micro_batch_tokens=micro_batch_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        aggregation=config.algorithm.aggregation,
        seed=config.seed + 1_000_003 * iteration,
    )


def named(role: Literal["actor", "critic"], reply: dict[str, float]) -> dict[str, float]:
    """Prefix a rank's figures with the role, but those that have a prefix."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in reply.items()}


@task(task_run_name="update-critic-{settings.iteration:06d}", cache_policy=NO_CACHE)
def update_critic(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Train the critic, or that of each agent; return its metrics."""
    critic = training.config.critic
    assert critic is not None
    command = UpdateCritic(
        path=stage.experience.path,
        split=split(training, settings.iteration, settings.critic_micro_batch_tokens),
        clip=critic.value_clip,
        learning_rate=settings.critic_learning_rate,
        agents=tuple(training.config.agents),
    )
    return updated(training, "critic", command, f"{settings.iteration}/update_critic")
