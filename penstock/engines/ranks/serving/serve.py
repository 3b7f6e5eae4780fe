"""What a rank has under way between messages: it steps the decode loop, and says which commands begin meanwhile.

The rank loop (penstock/engines/groups/rank.py) asks before each step of vLLM which of the commands that have come begin
now. Commands begin in the order in which they came to every rank: one that has no business in a generation
(penstock/engines/ranks/serving/handlers.py) waits until all is generated, and the others behind it.

Ranks of one engine step together, so a command has to begin before the same step on all of them, though it does not
reach them at the same time. Every AGREE_EVERY steps they agree on the number that all have got. Engines of one rank
agree with nobody: a command begins before the next step.

Left out: the steps themselves (penstock/engines/rollout/decode_loop.py), what commands do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import HANDLERS, Later
from penstock.engines.rollout import vllm as versions
from penstock.engines.rollout.decode_loop import Generation
from penstock.engines.rollout.engine import Generator

AGREE_EVERY = 8  # steps: an agreement takes about 0.1 ms
Finish = Callable[[Any], dict[str, Any]]  # makes a command's result of its reply


class Serving:
    """The commands of a rank that are pending because their generations are under way."""

    def __init__(self, models: RankModels) -> None:
        self._models = models
        self._pending: dict[Generation, PendingReply] = {}
        self._asked = 0

    def begin(self, later: Later[Any], finish: Finish) -> PendingReply:
        """Return the command that waits for a generation, which is submitted."""
        pending = self._pending[later.generation] = PendingReply(self, later, finish)
        return pending

    def step(self) -> None:
        """Run a step of vLLM; the results of commands whose generations end with it are made."""
        loop = self._generator.loop
        loop.step()
        for generation in loop.take():
            self._pending.pop(generation).end()

    def admitted(self, commands: Sequence[str]) -> int:
        """Return how many of the commands that wait, in order, begin before the next step; asked before each."""
        here = len(list(takewhile(self._may_begin, commands)))
        if self._generator.place.ranks_per_engine == 1:
            return here
        self._asked += 1
        return 0 if self._asked % AGREE_EVERY else versions.least_of_ranks(here)

    def _may_begin(self, command: str) -> bool:
        return command in HANDLERS and HANDLERS[command].during_generation(self._models)

    @property
    def _generator(self) -> Generator:
        assert self._models.generator is not None
        return self._models.generator


class PendingReply:
    """A command whose generation is under way, as the rank loop sees it (`penstock.engines.groups.rank.Pending`)."""

    def __init__(self, serving: Serving, later: Later[Any], finish: Finish) -> None:
        self.result: dict[str, Any] | None = None
        self.admitted, self.step = serving.admitted, serving.step
        self._later, self._finish = later, finish

    def end(self) -> None:
        """Make the result: the generation has ended."""
        self.result = self._finish(self._later.reply())
