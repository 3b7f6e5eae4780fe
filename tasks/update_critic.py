"""Update the critic on the same experience as the actor."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.session import Stage, Training, timed
from tasks.settings import Settings
from tasks.update_actor import named, split
from tasks.utilisation import role_figures


@task(task_run_name="update-critic-{settings.iteration:06d}", cache_policy=NO_CACHE)
def update_critic(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Train the critic; return its metrics."""
    critic = training.config.critic
    assert critic is not None
    metrics: dict[str, float] = {}
    key = f"{settings.iteration}/update_critic"
    with timed(metrics, "update_critic"):
        replies = training.session().call(
            "critic",
            "update_critic",
            key,
            path=stage.experience.path,
            split=split(training, settings.iteration, settings.critic_micro_batch_tokens),
            clip=critic.value_clip,
            learning_rate=settings.critic_learning_rate,
        )
    return metrics | named("critic", replies[0]) | role_figures(training, "critic", key)
