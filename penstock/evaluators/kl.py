"""How far the policy has moved from the reference, on responses to prompts that no update ever sees.

Two unbiased estimates from the log-probs of responses that the policy sampled (penstock/algorithms/kl.py); for greedy
responses, which nobody sampled, they are measures of the distance along them. Suffixes: `_T` tokens, `_B` rows, `_P`
prompts.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.kl import kl_estimate
from penstock.algorithms.segments import segment_sum
from penstock.evaluators.bootstrap import with_intervals
from penstock.evaluators.heldout import HeldOut


class KL:
    """`kl` (k3, never negative) and `kl_k1`, nats per token: means over prompts, with intervals."""

    name = "kl"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        """Return the figures.

        Raises:
            ValueError: the responses have no log-probs.
        """
        return with_intervals(self.per_prompt(heldout))

    def per_prompt(self, heldout: HeldOut) -> dict[str, np.ndarray]:
        """Return for each prompt the mean over all counted tokens of its responses.

        Raises:
            ValueError: the responses have no log-probs.
        """
        if heldout.logprobs is None or heldout.reference_logprobs is None or heldout.counted_T is None:
            raise ValueError("the KL to the reference needs log-probs of both")
        actor_T, reference_T = (
            ragged.values_T.astype(np.float64) for ragged in (heldout.logprobs, heldout.reference_logprobs)
        )
        counted_T, offsets_B1 = heldout.counted_T, heldout.logprobs.offsets_B1
        tokens_P = heldout.per_prompt(segment_sum(counted_T.astype(np.float64), offsets_B1)).sum(axis=1)
        figures = {}
        for name, estimator in (("kl", "k3"), ("kl_k1", "k1")):
            sums_B = segment_sum(kl_estimate(actor_T, reference_T, estimator) * counted_T, offsets_B1)
            figures[name] = heldout.per_prompt(sums_B).sum(axis=1) / np.maximum(tokens_P, 1)
        return figures
