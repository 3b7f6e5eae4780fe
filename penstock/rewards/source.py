"""Where rewards come from, if not from a reward model inside the training: workers, a judge, or a service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from configs.sections.reward import RewardConfig
from penstock.rewards.ahead import Scorer
from penstock.rewards.judge import Judge
from penstock.rewards.pool import RewardPool
from penstock.rewards.service import RewardService

__all__ = ["Scorer", "open_scorer"]


@contextmanager
def open_scorer(config: RewardConfig, columns: Sequence[str], log: Path | None = None) -> Iterator[Scorer]:
    """Open the configured source of rewards, for a whole training.

    Args:
        columns: names of the columns that the data rows have.
        log: file for what the user's function prints; None: standard error.

    Raises:
        UserError: it cannot be used with these columns.
    """
    if config.service is not None:
        with Scorer(RewardService(config), config.max_failure_share) as scorer:
            yield scorer
        return
    source = Judge(config, columns, log) if config.judge is not None else RewardPool(config, columns, log)
    with source, Scorer(source, config.max_failure_share) as scorer:
        yield scorer
