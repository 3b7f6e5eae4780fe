"""Tasks that only move data are tried again after an error, but not after a user's mistake or the loss of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.states import Failed

from penstock.base.errors import UserError
from penstock.engines.groups.group import HostLost
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.reward import reward


@pytest.mark.parametrize("task", [reward, advantage])
def test_what_would_come_again_is_not_tried_again(task: object) -> None:
    """By the task's own condition, asked as Prefect asks it."""
    assert task.retries == 1
    assert task.retry_condition_fn(task, None, Failed(data=OSError("a disk that may answer the next time")))
    assert not task.retry_condition_fn(task, None, Failed(data=UserError("the reward function fails", "mend it")))
    assert not task.retry_condition_fn(task, None, Failed(data=HostLost("main", 0, "its host is lost", Path("log"))))
