"""Where rewards come from, by the key that configures it: how a source is checked before a start, and opened for one.

A source scores samples (`Source` in penstock/rewards/ahead.py); a reward model inside the training is none: its engine
group scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.ahead import Scorer, Source
from penstock.rewards.function import check_function
from penstock.rewards.judge import Judge, check_judge
from penstock.rewards.pool import RewardPool
from penstock.rewards.service import RewardService, check_service
from penstock.usercode.sandbox import check_sandbox

__all__ = ["SOURCES", "Kind", "Scorer", "check_source", "open_scorer"]


@dataclass(frozen=True)
class Kind:
    """A kind of source. Both functions get the section `reward` and the names of the columns that data rows have.

    Args:
        check: raises a `UserError` where the source cannot be used.
        open: takes also a file for what the user's code prints (None: standard error), and returns the source, which
            is closed with the training.
    """

    check: Callable[[RewardConfig, Sequence[str]], None]
    open: Callable[[RewardConfig, Sequence[str], Path | None], AbstractContextManager[Source]]


SOURCES: Mapping[str, Kind] = {  # by the key below `reward`
    "function": Kind(check_function, RewardPool),
    "judge": Kind(check_judge, Judge),
    "service": Kind(
        lambda config, columns: check_service(config), lambda config, columns, log: nullcontext(RewardService(config))
    ),
}


def check_source(config: RewardConfig, columns: Sequence[str]) -> None:
    """Check the configured source of rewards before anything starts: it loads, or its server answers.

    Raises:
        UserError: it cannot be used, or not with these columns.
    """
    if config.sandbox is not None:
        check_sandbox("reward.sandbox")
    SOURCES[str(config.kind)].check(config, columns)


@contextmanager
def open_scorer(config: RewardConfig, columns: Sequence[str], log: Path | None = None) -> Iterator[Scorer]:
    """Open the configured source of rewards, for a whole training.

    Args:
        columns: names of the columns that the data rows have.
        log: file for what the user's function prints; None: standard error.

    Raises:
        UserError: it cannot be used with these columns.
    """
    with (
        SOURCES[str(config.kind)].open(config, columns, log) as source,
        Scorer(source, config.max_failure_share) as scorer,
    ):
        yield scorer
