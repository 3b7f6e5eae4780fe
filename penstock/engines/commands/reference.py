"""Commands about the reference beyond log-probs of single tokens (penstock/engines/ranks/reference.py).

Suffix: `_T` response tokens of this rank's rows, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class ReferenceStates(Command[None]):
    """Write the reference's final hidden states of the experience at `path` to the file `output`."""

    path: str
    budget: int  # tokens of a micro-batch
    output: str


@dataclass(frozen=True)
class TokenValuesAndKl:
    """Of each response token of the rows that a rank took: the actor's log-prob, and its KL to the reference."""

    rows: np.ndarray  # int64
    values_T: np.ndarray  # float32
    kl_T: np.ndarray  # float32


@dataclass(frozen=True)
class LogprobsAndKl(Command[TokenValuesAndKl]):
    """Log-probs under the actor, and its KL over the vocabulary to the reference, whose states lie at `states`."""

    path: str
    temperature: float
    budget: int
    states: str


@dataclass(frozen=True)
class Digests:
    """Digests of weights; equal where the weights are."""

    digests: list[str]


@dataclass(frozen=True)
class RefreshReference(Command[Digests]):
    """Make the reference a copy of the actor of the same group; replies with digests of both."""

    changes_state: ClassVar[bool] = True


@dataclass(frozen=True)
class WriteActor(Command[Digests]):
    """Write the actor's weights to `path` for a reference in another group."""

    path: str


@dataclass(frozen=True)
class ReadReference(Command[Digests]):
    """Give the reference the weights at `path`."""

    changes_state: ClassVar[bool] = True
    path: str
