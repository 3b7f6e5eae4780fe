"""Commands for forward passes over experience: log-probs, values, scores.

`path` is the file of the experience, `budget` the tokens of a micro-batch. Suffix: `_T` response tokens of this rank's
rows, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class TokenValues:
    """A number for each response token of the rows that a rank took: `rows`, in the order of `values_T`."""

    rows: np.ndarray  # int64
    values_T: np.ndarray  # float32


@dataclass(frozen=True)
class Logprobs(Command[TokenValues]):
    """Log-probs of response tokens under a model: the actor, the reference, or one trained on preferences."""

    path: str
    role: Literal["actor", "reference", "preference"]
    temperature: float
    budget: int
    replayed: bool = False  # whether tokens take the experts that they took in the rollout


@dataclass(frozen=True)
class Values(Command[TokenValues]):
    """Values of response tokens by the critic, or of each row by that of its agent."""

    path: str
    budget: int
    agents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scores:
    """The reward model's scores, float32, in the order of the texts."""

    scores_B: np.ndarray


@dataclass(frozen=True)
class Score(Command[Scores]):
    """Score this rank's texts with the reward model."""

    texts: list[str]
    budget: int
