"""What the rollout engines are asked for, what they reply, and the handle of a rollout that has begun.

Left out: the asking (penstock/session/rollout/generation.py), and which prompts a rollout answers
(penstock/tasks/iteration/rollout.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pandas as pd

from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, EngineResponses, Sampling
from penstock.state.deferred import Deferred


@dataclass(frozen=True)
class GenerationRequest:
    """What the engines are asked for.

    Attributes:
        prompts: rows of a prompt table.
        key: idempotency key of the command.
        sampling: how its tokens are sampled.
        split: prompt table that the prompts come from; environments see its columns.
        wanted: how many of the prompts have to be answered; None: all.
        required: of those, how many are the first ones.
        carried: what there is of responses to the first prompts; None: what is not answered is dropped.
        ended: responses that are there already.
        together: prompts that are under way at a time; None: as many as there is room for.
        tell_all: whether engines tell of all responses that end, also of the last.
    """

    prompts: pd.DataFrame
    key: str
    sampling: Sampling
    split: str = "train"
    wanted: int | None = None
    required: int = 0
    carried: CarriedResponses | None = None
    ended: EndedResponses | None = None
    together: int | None = None
    tell_all: bool = False


@dataclass(frozen=True)
class Replies:
    """What the rollout ranks replied to a generation, and when it began and ended (`time.perf_counter`)."""

    ranks: list[EngineResponses | None]
    began: float
    ended: float


@dataclass(frozen=True)
class BegunGeneration:
    """A generation that the engines have begun; `replies` come when they have ended it."""

    request: GenerationRequest
    replies: Future[Replies]


@dataclass(frozen=True)
class Round:
    """The prompts that a rollout begins.

    Attributes:
        begun: in the order in which the engines get them.
        drawn: how many of them, the last ones, nobody has drawn before.
        wanted: how many of them make the batch; None: all.
        resting: prompts that wait for a later round.
        again: how many of them, before those that are drawn, begin anew where others go on.
        required: how many of them, the first ones, make the batch in any case.
        last_chance: how many after those rest afterwards unless they make the batch: what they have is dropped.
        goes_on: whether a later round goes on with what there is of responses to the others, as this one does with
            what an earlier one has left.
        together: how many of them are under way at a time; None: as many as there is room for.
    """

    begun: tuple[Deferred, ...]
    drawn: int
    wanted: int | None
    resting: tuple[Deferred, ...] = ()
    again: int = 0
    required: int = 0
    last_chance: int = 0
    goes_on: bool = False
    together: int | None = None

    @property
    def rows_P(self) -> np.ndarray:
        """Their rows in the table of prompts."""
        return np.asarray([prompt.row for prompt in self.begun], np.int64)

    @property
    def begun_before(self) -> tuple[Deferred, ...]:
        """Those that an earlier round has left, where this one goes on with them."""
        return self.begun[: len(self.begun) - self.drawn - self.again]

    def left(self, answered: Sequence[int]) -> tuple[Deferred, ...]:
        """Return the prompts that were begun and wait afterwards, in the order of the engines.

        Args:
            answered: positions of the prompts that make the batch.
        """
        taken, last = set(answered), range(self.required, self.required + self.last_chance)
        return tuple(
            dataclasses.replace(prompt, rests=True) if position in last else prompt
            for position, prompt in enumerate(self.begun)
            if position not in taken
        )

    def waiting(self, answered: Sequence[int]) -> tuple[Deferred, ...]:
        """Return all prompts that wait afterwards, those that were drawn first before others."""
        return tuple(sorted((*self.resting, *self.left(answered)), key=lambda prompt: prompt.since))


@dataclass(frozen=True)
class BegunRollout:
    """A rollout with its prompts; without a generation where an earlier attempt left the responses."""

    round: Round
    prompts: pd.DataFrame
    generation: BegunGeneration | None


@dataclass(frozen=True)
class Rollout:
    """Handle of a rollout that has begun.

    Flows hold it and hand it to tasks, so it carries no prompt and no response, which Prefect would write down. The
    rollout itself is in `Session.rollouts` under its key.
    """

    iteration: int
    key: str
