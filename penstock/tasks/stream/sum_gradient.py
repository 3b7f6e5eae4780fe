"""Sum gradient: a portion's gradient is added to the actor's, on which the update then takes its one step.

The experience says which groups made which portion: whoever does the update again adds in the same order. Left out: the
step (penstock/tasks/iteration/update.py).
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.engines.commands.update import SumGradient
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings
from penstock.state.experience import origin_of
from penstock.tasks.iteration.update import actor_loss, split
from penstock.tasks.stream.portion import PORTIONS


@task(task_run_name="sum-gradient-{settings.iteration:06d}-{number}", cache_policy=NO_CACHE)
def sum_gradient(training: Training, settings: Settings, stage: Stage, number: int) -> Stage:
    """Add the gradient of a portion to the actor's."""
    return sum_of_groups(training, settings, stage, number, None)


def sum_of_groups(training: Training, settings: Settings, stage: Stage, number: int, groups: list[int] | None) -> Stage:
    """Add the gradient of some groups to the actor's, as portion `number`; None: of all in the experience."""
    portions, metrics = training.config.rollout.portions, dict(stage.metrics)
    command = SumGradient(
        path=stage.experience.path,
        version=stage.experience.policy_version,
        split=split(training, settings.iteration, settings.micro_batch_tokens),
        loss=actor_loss(training.config.algorithm, settings),
        first=number == 0,
        last=number == portions - 1,
        groups=groups,
    )
    training.session().say("update", f"portion {number + 1} of {portions}")
    with timed(training, metrics, "update_actor"):
        training.session().call("actor", command, f"{settings.iteration}/update_actor/{number}")
    return Stage(stage.experience, metrics)


def sum_again(training: Training, settings: Settings, stage: Stage) -> None:
    """Sum the gradient of an iteration's experience anew, in the portions in which it was summed."""
    for number, groups in enumerate(origin_of(stage.experience.path)[PORTIONS]):
        sum_of_groups(training, settings, stage, number, groups)
