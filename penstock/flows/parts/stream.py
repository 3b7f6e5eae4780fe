"""The first half of an iteration where the actor learns from a batch that is being generated: `rollout.stream`.

    as groups are complete: portion -> reward -> (old log-probs | reference log-probs | values) -> advantage
                                    -> sum gradient
    then: join

Rollout and actor are engine groups of their own, or ranks that do both at the same time. The policy stays what it is
until all is summed. Left out: a rollout that begins before the update on the one before (penstock/flows/iteration.py).
"""

from __future__ import annotations

from penstock.flows.parts.passes import forward_passes
from penstock.session.requests import Rollout
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.reward import reward
from penstock.tasks.stream.join import join
from penstock.tasks.stream.portion import portion
from penstock.tasks.stream.sum_gradient import sum_gradient


def streamed(training: Training, settings: Settings, begun: Rollout) -> Stage:
    """Sum the gradient of a rollout that has begun, portion by portion; return its experience."""
    stages = []
    for number in range(training.config.rollout.portions):
        stage = portion(training, settings, begun, number)
        stage = reward(training, settings, stage)
        stage = advantage(training, settings, stage, forward_passes(training, settings, stage))
        stages.append(sum_gradient(training, settings, stage, number))
    return join(training, settings, begun, stages)
