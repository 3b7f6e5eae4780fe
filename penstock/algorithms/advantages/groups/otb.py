"""Optimal token baseline: at every position, the group's mean return weighted by the gradient spent so far.

Source: Li et al. 2026 (arXiv 2602.07078). The squared norm of a token's gradient by the logits is
1 - 2 p + (sum of p^2 over the vocabulary). What is used here is its part from the chosen token, (1 - p)^2: it needs the
log-probability alone, no pass over the vocabulary, and is at least half of the whole.

Shapes: _C counted tokens.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import centred
from penstock.algorithms.segments import discounted_sums, lengths, rows_of_tokens

NEEDS: tuple[Need, ...] = ("group", "old_logprobs")

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="otb",
        advantage="otb",
        policy_loss="ppo_clip",
        description="no critic: a baseline per position, the group's returns weighted by the gradient spent so far",
        paper="2602.07078",
    ),
)


def otb(inputs: AdvantageInputs) -> Advantages:
    """A_t = G_t - (sum of W_t G_t) / (sum of W_t) over the group's rows that reach counted token t.

    G_t is the reward still to come, W_t the sum of (1 - p)^2 over the row's counted tokens up to t. Equal returns give
    exactly 0; so does a position that only one row reaches, hence a group of one. Where all W_t are 0 the rows weigh
    the same.

    Note:
        ``W_t`` sums ``(1 - p)^2``, the chosen token's part of the paper's ``1 - 2 p + sum of p^2`` and at least half of
        it. It takes a pass for old log-probs.

    Raises:
        ValueError: ``inputs.old_logprobs_T`` is None.
    """
    if inputs.old_logprobs_T is None:
        raise ValueError("otb needs the log-probabilities of the policy that generated, and the inputs hold none")
    counted = inputs.counted()
    row_C = rows_of_tokens(counted.offsets_B1)
    position_C = np.arange(row_C.size) - counted.offsets_B1[row_C]
    returns_C = discounted_sums(counted.rewards_C, counted.offsets_B1, 1.0)
    spent_C = np.expm1(inputs.old_logprobs_T[counted.at_C].astype(np.float64)) ** 2
    cumulated_C = np.cumsum(spent_C)
    before_B = np.append(0.0, cumulated_C)[counted.offsets_B1[:-1]]
    weights_C = np.maximum(cumulated_C - before_B[row_C], 0.0)
    longest = lengths(counted.offsets_B1).max(initial=0)
    group_B = np.unique(inputs.groups_B, return_inverse=True)[1]
    return Advantages(counted.spread(centred(returns_C, group_B[row_C] * longest + position_C, weights_C)))
