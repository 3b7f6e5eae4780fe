"""What an evaluator sees, and what it is: held-out responses in, figures out.

Suffixes: `_B` rows (responses), `_P` prompts, `_PN` prompts x responses per prompt, `_T` tokens of all rows.
Left out: generating and scoring the responses (penstock/tasks/iteration/evaluate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.base.ragged import Ragged


@dataclass(frozen=True)
class HeldOut:
    """Responses to held-out prompts, `samples` adjacent rows for each prompt, in the order of the prompts.

    Attributes:
        samples: responses of each prompt, n; of a game those of all agents.
        prompt_ids: split and row of the file, of each row.
        prompts: text as the model got it, of each row.
        rows: the data row that the prompt came from, column to value, of each row.
        texts: responses, special tokens removed.
        tokens: token ids of the responses, the end-of-sequence token included.
        rewards_B: what the configured reward gave.
        truncated_B: whether the response was cut at the longest length.
        logprobs: of the responses under the actor, where `kl` is measured; None otherwise.
        reference_logprobs: the same under the reference.
        counted_T: 1 for the policy's own tokens, 0 for observations, where log-probs are.
        agents: of a game; a prompt has as many responses of the first, then of the second, and so on.
    """

    samples: int
    prompt_ids: list[str]
    prompts: list[str]
    rows: list[dict[str, Any]]
    texts: list[str]
    tokens: Ragged
    rewards_B: np.ndarray
    truncated_B: np.ndarray
    logprobs: Ragged | None = None
    reference_logprobs: Ragged | None = None
    counted_T: np.ndarray | None = None
    agents: tuple[str, ...] = ()

    def per_prompt(self, values_B: np.ndarray) -> np.ndarray:
        """Return values of rows as (P, n): one line per prompt."""
        return values_B.reshape(-1, self.samples)


class Evaluator(Protocol):
    """Anything with a name and figures for held-out responses; a class named in the recipe is made without arguments.

    The figures of one's own class are recorded as `heldout/<name>/<figure>`.
    """

    name: str

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        """Return figures by name."""
        ...
