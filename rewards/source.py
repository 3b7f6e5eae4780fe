"""Where rewards come from, if not from a reward model inside the training: workers, a judge, or a service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from configs.schema import RewardConfig
from rewards.judge import Judge
from rewards.scoring import RewardPool, Sample, Score
from rewards.service import RewardService


class Scorer(Protocol):
    """Gives every sample its worth."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score every sample, in order; a failure is a value."""


@contextmanager
def open_scorer(config: RewardConfig, columns: Sequence[str]) -> Iterator[Scorer]:
    """Open the configured source of rewards, for a whole training.

    Args:
        columns: names of the columns that the data rows have.

    Raises:
        UserError: it cannot be used with these columns.
    """
    if config.service is not None:
        yield RewardService(config)
        return
    with Judge(config, columns) if config.judge is not None else RewardPool(config, columns) as scorer:
        yield scorer
