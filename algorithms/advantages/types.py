"""What every advantage estimator takes and returns.

Shapes: _T flat response tokens of a packed batch, _B rows (sequences), _B1 offsets (B + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from algorithms.segments import lengths, segment_sum


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch, before it is cut into mini-batches.

    Args:
        rewards_B: reward of each sequence, the sum over its parts.
        token_rewards_T: reward of single tokens, such as a KL penalty; zeros when there is none. ``rewards_B`` is not
            in it: an estimator adds that at a row's last counted token. Ignored where the mask is 0.
        mask_T: 1 where the token is the model's own, 0 for observations (tool output, user turns).
        offsets_B1: where rows begin and end.
        groups_B: integer of the prompt that a row answers; rows of one prompt share it.
        values_T: the critic's value of the state before each token, or None without a critic.
    """

    rewards_B: np.ndarray
    token_rewards_T: np.ndarray
    mask_T: np.ndarray
    offsets_B1: np.ndarray
    groups_B: np.ndarray
    values_T: np.ndarray | None = None

    def scores_B(self) -> np.ndarray:
        """Everything that a row earned, in float64: its reward plus its counted token rewards."""
        return self.rewards_B + segment_sum(self.token_rewards_T * self.mask_T, self.offsets_B1)


@dataclass(frozen=True)
class Advantages:
    """float32 and 0 where the mask is 0.

    Args:
        advantages_T: advantage of each token.
        returns_T: the critic's target, or None where the estimator gives none.
    """

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None


def spread_over_tokens(advantages_B: np.ndarray, inputs: AdvantageInputs) -> Advantages:
    """Give every counted token of a row the row's advantage."""
    advantages_T = np.repeat(advantages_B, lengths(inputs.offsets_B1)) * inputs.mask_T
    return Advantages(advantages_T.astype(np.float32))
