"""What every advantage estimator takes and returns.

Shapes: _T flat response tokens of a packed batch, _B rows (sequences), _B1 offsets (B + 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.algorithms.segments import lengths, segment_sum


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
        old_logprobs_T: log-probability of each token under the policy that generated it, or None.
        baselines_B: reward of the greedy response to a row's prompt, or None.
        parts_B: the parts of the rewards by name, NaN where a row has none of that name.
        agents_B: number of the agent that a row is for, or None where there is one.
    """

    rewards_B: np.ndarray
    token_rewards_T: np.ndarray
    mask_T: np.ndarray
    offsets_B1: np.ndarray
    groups_B: np.ndarray
    values_T: np.ndarray | None = None
    old_logprobs_T: np.ndarray | None = None
    baselines_B: np.ndarray | None = None
    parts_B: Mapping[str, np.ndarray] = field(default_factory=dict)
    agents_B: np.ndarray | None = None

    def scores_B(self) -> np.ndarray:
        """Everything that a row earned, in float64: its reward plus its counted token rewards."""
        return self.rewards_B + segment_sum(self.token_rewards_T * self.mask_T, self.offsets_B1)

    def counted(self) -> CountedTokens:
        """The counted tokens alone, with what each of them earned: a row's reward comes with its last one."""
        at_C = np.flatnonzero(self.mask_T)
        offsets_B1 = np.searchsorted(at_C, self.offsets_B1)
        filled_B = lengths(offsets_B1) > 0
        last_B = offsets_B1[1:][filled_B] - 1
        rewards_C = self.token_rewards_T[at_C].astype(np.float64)
        rewards_C[last_B] += self.rewards_B[filled_B]
        return CountedTokens(at_C, offsets_B1, last_B, rewards_C, self.mask_T.size)


@dataclass(frozen=True)
class CountedTokens:
    """A batch without its observations, which take no step of time.

    Args:
        at_C: where the counted tokens stand among all tokens.
        offsets_B1: where rows begin and end among the counted tokens.
        last_B: the last counted token of each row that has one.
        rewards_C: reward of each counted token, that of the sequence included.
        tokens: number of all tokens.
    """

    at_C: np.ndarray
    offsets_B1: np.ndarray
    last_B: np.ndarray
    rewards_C: np.ndarray
    tokens: int

    def spread(self, values_C: np.ndarray) -> np.ndarray:
        """Put values of the counted tokens where they belong among all tokens, _T in float32; 0 elsewhere."""
        values_T = np.zeros(self.tokens, dtype=np.float32)
        values_T[self.at_C] = values_C
        return values_T


@dataclass(frozen=True)
class Advantages:
    """float32 and 0 where the mask is 0.

    Args:
        advantages_T: advantage of each token.
        returns_T: the critic's target, or None where the estimator gives none.
        accepted_B: whether the update looks at a row at all; the others are in no term and no divisor. None for all.
    """

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None
    accepted_B: np.ndarray | None = None


def spread_over_tokens(advantages_B: np.ndarray, inputs: AdvantageInputs) -> Advantages:
    """Give every counted token of a row the row's advantage."""
    advantages_T = np.repeat(advantages_B, lengths(inputs.offsets_B1)) * inputs.mask_T
    return Advantages(advantages_T.astype(np.float32))


def accept(accepted_B: np.ndarray, inputs: AdvantageInputs) -> Advantages:
    """Give every counted token of the accepted rows 1, and leave the other rows out of the loss."""
    return replace(spread_over_tokens(accepted_B.astype(np.float64), inputs), accepted_B=accepted_B)
