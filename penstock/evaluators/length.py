"""How long the held-out responses are, and how many were cut."""

from __future__ import annotations

import numpy as np

from penstock.evaluators.bootstrap import with_intervals
from penstock.evaluators.heldout import HeldOut


class Length:
    """`response_length_mean` with an interval, `response_length_p95` (tokens), `truncated_share`."""

    name = "length"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        """Return the figures over all responses."""
        lengths_B = heldout.tokens.lengths_B
        return {
            **with_intervals(self.per_prompt(heldout)),
            "response_length_p95": float(np.quantile(lengths_B, 0.95)),
            "truncated_share": float(np.mean(heldout.truncated_B)),
        }

    def per_prompt(self, heldout: HeldOut) -> dict[str, np.ndarray]:
        """Return the mean length of each prompt's responses."""
        return {"response_length_mean": heldout.per_prompt(heldout.tokens.lengths_B).mean(axis=1)}
