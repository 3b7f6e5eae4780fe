"""A taskset of verifiers, as a user would write one: sums of two numbers. It runs where verifiers is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verifiers import v1 as vf

__all__ = ["Sums"]


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the reply has the right number in it."""
        return float(str(self.data.answer) in re.findall(r"\d+", trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """The characters of the reply."""
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        numbers = range(self.config.largest + 1)
        for a in numbers:
            for b in numbers:
                yield SumsTask(SumsData(id=f"{a}+{b}", prompt=f"What is {a}+{b}?", answer=a + b), self.config.task)


async def endless(trace: vf.Trace) -> float:
    """A metric that is no number to record."""
    return float("inf")
