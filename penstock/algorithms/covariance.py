"""How much single tokens drive the policy's entropy down: the covariance of their log-probability and advantage.

Source: Cui et al. 2025 (arXiv 2505.22617), equation 10. Computed over a whole mini-batch before it is split, from what
is known then, the advantages and the log-probabilities of the policy that generated: the split changes nothing.

Shapes: _C counted tokens of a mini-batch, in the order of its rows.
"""

from __future__ import annotations

import numpy as np


def token_covariances(advantages_C: np.ndarray, old_logprobs_C: np.ndarray) -> np.ndarray:
    """(log p - mean log p) (A - mean A) of each token, the means over the mini-batch, float64."""
    advantages_C, logprobs_C = advantages_C.astype(np.float64), old_logprobs_C.astype(np.float64)
    return (logprobs_C - logprobs_C.mean()) * (advantages_C - advantages_C.mean())


def number_of(share: float, tokens: int) -> int:
    """That share of the tokens, rounded down, at least one."""
    return min(tokens, max(1, int(share * tokens)))
