"""The updates of an iteration: the actor's, and beside it the critic's if there is one."""

from __future__ import annotations

from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.tasks.iteration.update import update_actor, update_critic


def update(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Update the actor, and the critic beside it if there is one."""
    if not training.config.algorithm.needs_critic:
        return update_actor(training, settings, stage)
    critic = update_critic.submit(training, settings, stage)
    return update_actor(training, settings, stage) | critic.result()
