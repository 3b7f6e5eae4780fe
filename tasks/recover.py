"""Recover: after a loss all engine groups begin their next epoch, on the same hosts or on others in their place.

The groups that have lost nothing end with the others: they are an iteration ahead of what is restored, and what they
replied must not be taken for replies to the same commands of the iteration that is done again. Left out: bringing the
new ranks to where the training stands, which is what a resume does (tasks/iteration/checkpoint.py).
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.groups.group import RankLost
from penstock.session.events import noted
from penstock.session.session import Training
from penstock.state.run_folder import drop_partial


@task(task_run_name="recover", cache_policy=NO_CACHE)
def recover(training: Training, loss: RankLost) -> None:
    """Note a loss, end what is left of the engine groups, and start all anew.

    Raises:
        LostTooOften: more was lost than `engine.restarts` allows.
        UserError: a host of another machine does not join again.
    """
    session = training.session()
    noted(training, loss)
    session.say("recovering")
    session.restart_groups()
    session.consolidator.wait()
    drop_partial(training.run)
