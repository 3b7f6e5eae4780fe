"""An environment that takes its time, as tools behind a network do: seconds of a log-normal distribution.

Half of the answers take up to `median_s`, one in a hundred `p99_s` and more, and none more than `longest_s`, after
which such a tool would give up. The policy says something, the environment waits, and the episode is over. Left out:
anything to learn.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from penstock.environments.environment import Step

Z99 = 2.3263  # of a normal distribution, one in a hundred lies above


def seconds_of(seed: int, median_s: float, p99_s: float, longest_s: float) -> float:
    """Return how long an episode's answer takes."""
    return min(longest_s, random.Random(seed).lognormvariate(math.log(median_s), math.log(p99_s / median_s) / Z99))


class SlowEnvironment:
    """One answer, after a while.

    Args:
        median_s: of the answers' seconds.
        p99_s: what one answer in a hundred exceeds.
        longest_s: what none exceeds.
    """

    def __init__(self, median_s: float = 1.0, p99_s: float = 20.0, longest_s: float = 60.0) -> None:
        self.median_s, self.p99_s, self.longest_s = median_s, p99_s, longest_s
        self.seed = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the seed, from which the seconds follow."""
        self.seed = seed

    async def step(self, text: str) -> Step:
        """Wait, and end the episode; the reward differs between samples, so that the gradient is not zero."""
        await asyncio.sleep(seconds_of(self.seed, self.median_s, self.p99_s, self.longest_s))
        return Step(done=True, reward=sum(map(str.isdigit, text)) / max(1, len(text)))
