"""What a rank has under way between messages: it steps the decode loop, and says which commands begin meanwhile.

The rank loop (penstock/engines/groups/rank.py) asks before each step of vLLM which of the commands that have come begin
now. Commands begin in the order in which they came to every rank: one that has no business in a generation
(penstock/engines/ranks/serving/handlers.py) waits until all is generated, and the others behind it.

Ranks of one engine step together, so a command has to begin before the same step on all of them, though it does not
reach them at the same time. Every AGREE_EVERY steps they agree on the number that all have got. Engines of one rank
agree with nobody: a command begins before the next step.

While the last responses are generated, the gradient of those that are complete may be summed (`rollout.stream` where
actor and rollout share their ranks). Such a command has a thread and, on a GPU, a stream of its own; none begins before
it has ended. It reads the weights that the generation reads, and changes none.

Left out: the steps themselves (penstock/engines/rollout/decode_loop.py), what commands do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from itertools import takewhile
from typing import Any

import torch

from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import HANDLERS, Later
from penstock.engines.rollout import vllm as versions
from penstock.engines.rollout.decode_loop import Generation
from penstock.engines.rollout.engine import Generator

LOOK_S = 0.01  # between two looks for messages while nothing is generated
AGREE_EVERY = 8  # steps: an agreement takes about 0.1 ms
Finish = Callable[[Any], dict[str, Any]]  # makes a command's result of its reply


class Serving:
    """The commands of a rank that are pending because their generations are under way."""

    def __init__(self, models: RankModels) -> None:
        self._models = models
        self._pending: dict[Generation, PendingReply] = {}
        self._asked = 0
        self._beside: PendingThread | None = None

    def begin(self, later: Later[Any], finish: Finish) -> PendingReply:
        """Return the command that waits for a generation, which is submitted."""
        pending = self._pending[later.generation] = PendingReply(self, later, finish)
        return pending

    def begin_beside(self, carry_out: Callable[[], dict[str, Any]]) -> PendingThread:
        """Return the command that is carried out while the generation goes on."""
        self._beside = PendingThread(self, carry_out, self._models.device)
        return self._beside

    def step(self) -> None:
        """Run a step of vLLM; the results of commands whose generations end with it are made.

        Raises:
            Exception: what was carried out beside the generation has failed.
        """
        loop, beside = self._generator.loop, self._beside
        if loop.busy:
            loop.step()
            for generation in loop.take():
                self._pending.pop(generation).end()
        elif beside is not None:
            beside.wait(LOOK_S)
        if beside is not None and beside.take():
            self._beside = None

    def admitted(self, commands: Sequence[str]) -> int:
        """Return how many of the commands that wait, in order, begin before the next step; asked before each."""
        here = 0 if self._beside is not None else self._beginning(commands)
        if self._generator.place.ranks_per_engine == 1:
            return here
        self._asked += 1
        return 0 if self._asked % AGREE_EVERY else versions.least_of_ranks(here)

    def _beginning(self, commands: Sequence[str]) -> int:
        """Return how many of the commands, in order, may begin: up to one that is carried out beside the generation."""
        able = list(takewhile(self._may_begin, commands))
        beside = (place for place, command in enumerate(able, start=1) if HANDLERS[command].beside)
        return next(beside, len(able))

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


class PendingThread:
    """A command that is carried out in a thread while a generation goes on, as the rank loop sees it."""

    def __init__(self, serving: Serving, carry_out: Callable[[], dict[str, Any]], device: torch.device) -> None:
        self.result: dict[str, Any] | None = None
        self.admitted, self.step = serving.admitted, serving.step
        self._carry_out, self._device = carry_out, device
        self._made: dict[str, Any] | None = None
        self._error: Exception | None = None
        here = copy_context()  # in which the compiler has its settings
        self._thread = threading.Thread(target=here.run, args=(self._run,), name="beside", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the command has ended, for so long at most."""
        self._thread.join(seconds)

    def take(self) -> bool:
        """Make the result if the command has ended; return whether it has.

        Raises:
            Exception: what ended it.
        """
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        self.result = self._made
        return True

    def _run(self) -> None:
        try:
            with on_own_stream(self._device):
                self._made = self._carry_out()
        except Exception as error:  # the rank loop tells the flow of it
            self._error = error


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, let the block's work follow what was queued before it, and be done behind it; no other waits for it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)  # a thread begins with the first
    own = torch.cuda.Stream(device)
    own.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(own):
        yield
    own.synchronize()
