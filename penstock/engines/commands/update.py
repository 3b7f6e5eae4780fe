"""Commands for the updates of actor and critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock.algorithms.correction import Correction
from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Split:
    """How experience is cut into optimizer steps and micro-batches; the same on every rank."""

    mini_batches: int
    epochs: int
    samples: int  # rows per prompt
    together: int  # rows in a row that are in the same mini-batch: 1, or all of a prompt
    micro_batch_tokens: int
    max_response_tokens: int
    aggregation: str
    seed: int


@dataclass(frozen=True)
class ActorLoss:
    """Settings of the actor's loss in force at this iteration."""

    policy_loss: str
    settings: dict[str, Any]
    temperature: float
    entropy_coefficient: float
    kl_estimator: str | None
    kl_coefficient: float
    choice_settings: dict[str, Any] = field(default_factory=dict)  # of the loss's `choose`, if it has one
    correction: Correction | None = None  # None: log-probs of the rollout are not looked at
    router_loss_coefficient: float = 0.0  # of a mixture of experts


@dataclass(frozen=True)
class Updated:
    """Figures of an update: means over its optimizer steps, and how many steps were taken and skipped."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class UpdateActor(Command[Updated]):
    """Train the actor on the experience at `path`, which the verified policy `version` generated.

    `states` names the file of the reference's hidden states, for a KL over the vocabulary.
    """

    changes_state: ClassVar[bool] = True
    path: str
    version: int
    split: Split
    loss: ActorLoss
    learning_rate: float
    states: str | None = None


@dataclass(frozen=True)
class SumGradient(Command[None]):
    """Add a portion of an iteration to the gradient of the actor, which the verified policy `version` generated.

    The iteration has one optimizer step, `StepActor`. What the loss is divided by is counted over all portions.
    """

    path: str
    version: int
    split: Split
    loss: ActorLoss
    first: bool  # the portion is the iteration's first: what is summed of another is forgotten
    last: bool
    groups: list[int] | None = None  # of the experience at `path`; None: all


@dataclass(frozen=True)
class StepActor(Command[Updated]):
    """Take the actor's step on the gradient that was summed of all portions of an iteration."""

    changes_state: ClassVar[bool] = True
    aggregation: str
    max_response_tokens: int
    learning_rate: float


@dataclass(frozen=True)
class UpdateCritic(Command[Updated]):
    """Train the critic on the experience at `path`; of several each on the rows of its agent."""

    changes_state: ClassVar[bool] = True
    path: str
    split: Split
    clip: float | None
    learning_rate: float
    agents: tuple[str, ...] = ()
