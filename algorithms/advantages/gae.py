"""Generalised advantage estimation, and PPO, the algorithm which it makes with the clipped loss.

Source: Schulman et al. 2015 (arXiv 1506.02438), equation 16. An episode ends with its response, also one cut off at
the length limit: nothing is bootstrapped beyond the last token.

Shapes: _T flat response tokens, _C the counted tokens among them, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

import numpy as np

from algorithms.advantages.types import AdvantageInputs, Advantages
from algorithms.algorithm import Algorithm
from algorithms.normalization import whitened
from algorithms.segments import lengths

ALGORITHM = Algorithm(
    name="ppo",
    advantage="gae",
    policy_loss="ppo_clip",
    critic=True,
    description="Proximal policy optimisation: a critic, generalised advantage estimation and a clipped ratio.",
)


def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95, whiten: bool = True) -> Advantages:
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), with delta_t = r_t + gamma V_(t+1) - V_t.

    Time runs over counted tokens only: an observation neither earns, nor is valued, nor takes a step of discount.

    Args:
        inputs: a batch with ``values_T``.
        gamma: discount per counted token.
        gae_lambda: 0 trusts the critic, 1 trusts the rewards.
        whiten: shift and scale the advantages to mean 0 and variance 1 over the counted tokens of the batch; the
            returns are computed before that.

    Raises:
        ValueError: ``inputs.values_T`` is None.
    """
    if inputs.values_T is None:
        raise ValueError("gae needs the critic's values, and the inputs hold none")
    at_C = np.flatnonzero(inputs.mask_T)
    offsets_B1 = np.searchsorted(at_C, inputs.offsets_B1)
    filled_B = lengths(offsets_B1) > 0
    last_B = offsets_B1[1:][filled_B] - 1

    values_C = inputs.values_T[at_C].astype(np.float64)
    rewards_C = inputs.token_rewards_T[at_C].astype(np.float64)
    rewards_C[last_B] += inputs.rewards_B[filled_B]
    next_values_C = np.roll(values_C, -1)
    next_values_C[last_B] = 0.0
    advantages_C = _discounted_sums(rewards_C + gamma * next_values_C - values_C, offsets_B1, gamma * gae_lambda)

    advantages_T, returns_T = np.zeros((2, inputs.mask_T.size), dtype=np.float32)
    advantages_T[at_C] = whitened(advantages_C) if whiten else advantages_C
    returns_T[at_C] = advantages_C + values_C
    return Advantages(advantages_T, returns_T)


def _discounted_sums(values_C: np.ndarray, offsets_B1: np.ndarray, decay: float) -> np.ndarray:
    """s_t = x_t + decay s_(t+1) within each row: one step of the loop serves all rows, from their ends backwards."""
    lengths_B = lengths(offsets_B1)
    longest_first_B = np.argsort(-lengths_B, kind="stable")
    ends_B = offsets_B1[1:][longest_first_B]
    # With the longest rows first, those that reach t tokens back are a prefix: no padding and no mask.
    rows_reaching = np.searchsorted(-lengths_B[longest_first_B], -np.arange(lengths_B.max(initial=0)))
    sums_C = np.empty_like(values_C)
    carry_B = np.zeros(lengths_B.size)
    for back, rows in enumerate(rows_reaching, start=1):
        at = ends_B[:rows] - back
        carry_B[:rows] = values_C[at] + decay * carry_B[:rows]
        sums_C[at] = carry_B[:rows]
    return sums_C
