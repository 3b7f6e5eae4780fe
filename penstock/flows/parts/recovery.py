"""Recovery: a training whose ranks or hosts are lost goes on inside the same flow run, as a resume would.

    work -> (a loss -> recover -> the same work, from where the run folder says that it stands) -> its end

Only lost processes are recovered from. A user's mistake, or what a rank's own code raises, would come again, and ends
the run. Left out: what is done again and what is found done (penstock/flows/train.py, penstock/flows/finetuning.py,
penstock/flows/sft.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.engines.groups.group import RankLost
from penstock.session.session import Training
from penstock.tasks.recover import recover

Result = TypeVar("Result")


def despite_losses(training: Training, work: Callable[[Training], Result]) -> Result:
    """Do the work of a run, which begins where its folder says that it stands; again after each loss.

    Raises:
        LostTooOften: more was lost than the configuration allows (`engine.restarts`).
    """
    while True:
        try:
            return work(training)
        except RankLost as loss:
            recover(training, loss)
