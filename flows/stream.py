"""The first half of an iteration where the actor learns while others generate: `rollout.stream`.

    as groups are complete: portion -> reward -> (old log-probs | reference log-probs | values) -> advantage
                                    -> sum gradient
    then: join

Rollout and actor are engine groups of their own. The policy stays what it is until all is summed, so nothing is
off-policy.
"""

from __future__ import annotations

from flows.passes import forward_passes
from penstock.session.requests import Rollout
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from tasks.iteration.advantage import advantage
from tasks.iteration.reward import reward
from tasks.stream.join import join
from tasks.stream.portion import portion
from tasks.stream.sum_gradient import sum_gradient


def streamed(training: Training, settings: Settings, begun: Rollout) -> Stage:
    """Sum the gradient of a rollout that has begun, portion by portion; return its experience."""
    stream, stages = training.config.rollout.stream, []
    assert stream is not None
    for number in range(stream.portions):
        stage = portion(training, settings, begun, number)
        stage = reward(training, settings, stage)
        stage = advantage(training, settings, stage, forward_passes(training, settings, stage))
        stages.append(sum_gradient(training, settings, stage, number))
    return join(training, settings, begun, stages)
