"""Recover: after a loss all engine groups begin their next epoch, on the same hosts or on others in their place.

The groups that have lost nothing end with the others: they are an iteration ahead of what is restored, and what they
replied must not be taken for replies to the same commands of the iteration that is done again. Where a GPU's memory did
not suffice, micro-batches are smaller from then on. Left out: bringing the new ranks to where the training stands,
which is what a resume does (penstock/tasks/iteration/checkpoint.py).
"""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.engines.groups.group import OutOfMemory, RankLost
from penstock.session.events import give_up, noted, tell_of_going_on
from penstock.session.session import Training
from penstock.session.settings import smaller_micro_batches
from penstock.state.run_folder import drop_partial


@task(task_run_name="recover", cache_policy=NO_CACHE)
def recover(training: Training, loss: RankLost) -> None:
    """Note a loss, end what is left of the engine groups, and start all anew.

    Raises:
        LostTooOften: more was lost than `engine.restarts` allows.
        OutOfMemory: no micro-batch can be smaller.
        UserError: a host of another machine does not join again.
    """
    session = training.session()
    noted(training, loss)
    if isinstance(loss, OutOfMemory):
        _lower(training, loss)
    tell_of_going_on(training, loss)
    session.say("recovering")
    session.restart_groups()
    session.consolidator.wait()
    drop_partial(training.run)


def _lower(training: Training, loss: OutOfMemory) -> None:
    if (lowered := smaller_micro_batches(training, loss.command)) is None:
        give_up(training)
        raise loss
    key, tokens = lowered
    get_run_logger().warning("%s is %d from now on: put that into the recipe to spare the restart", key, tokens)
