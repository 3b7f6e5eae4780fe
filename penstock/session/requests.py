"""What the rollout engines are asked for, what they reply, and the handle of a rollout that has begun.

Left out: the asking (penstock/session/rollout/generation.py), and which prompts a rollout answers
(tasks/iteration/rollout.py).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pandas as pd

from engines.commands.rollout import EngineResponses, Sampling


@dataclass(frozen=True)
class GenerationRequest:
    """What the engines are asked for.

    Attributes:
        prompts: rows of a prompt table.
        key: idempotency key of the command.
        sampling: how its tokens are sampled.
        split: prompt table that the prompts come from; environments see its columns.
    """

    prompts: pd.DataFrame
    key: str
    sampling: Sampling
    split: str = "train"


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
class BegunRollout:
    """A rollout with its prompts; without a generation where an earlier attempt left the responses."""

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
