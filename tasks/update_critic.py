"""Update the critic on the same experience as the actor."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.session import Stage, Training
from tasks.settings import Settings
from tasks.update_actor import split, updated


@task(task_run_name="update-critic-{settings.iteration:06d}", cache_policy=NO_CACHE)
def update_critic(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Train the critic, or that of each agent; return its metrics."""
    critic = training.config.critic
    assert critic is not None
    return updated(
        training,
        settings,
        stage,
        "critic",
        split=split(training, settings.iteration, settings.critic_micro_batch_tokens),
        clip=critic.value_clip,
        learning_rate=settings.critic_learning_rate,
        agents=training.config.agents,
    )
