"""The two commands by which log-probs of vLLM and of the actor are compared (penstock/engines/ranks/logprob_gap.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.forward import TokenValues
from penstock.engines.commands.message import Command
from penstock.engines.commands.rollout import Sharing


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that an engine sampled for its share of the prompts, and how likely vLLM says they were."""

    positions_P: np.ndarray  # the prompts, in the order in which the engine took them
    responses: Ragged
    logprobs_T: np.ndarray
    routes: Ragged | None = None  # experts that the tokens took, where they are recorded


@dataclass(frozen=True)
class SampleToCompare(Command[SampledTokens | None]):
    """Sample `tokens` tokens at temperature 1 for an engine's share of the prompts; its first rank replies."""

    measured: ClassVar[bool] = False
    number: int  # that no other generation of these engines has
    prompts: Ragged
    tokens: int
    seed: list[int]
    sharing: Sharing | None = None  # None: this group's ranks alone
    images: Ragged | None = None  # of the prompts, as in `Generate`


@dataclass(frozen=True)
class LogprobsToCompare(Command[TokenValues]):
    """Log-probs of the responses under the actor at temperature 1, for this rank's share of rows."""

    measured: ClassVar[bool] = False
    prompts: Ragged
    responses: Ragged
    budget: int  # tokens of a micro-batch
    routes: Ragged | None = None  # experts that the tokens are to take; None: those that the actor's routers choose
    images: Ragged | None = None  # of the prompts, as in `Generate`
