"""Ragged batches for the tests of advantage estimators, and the plain lists that independent loops walk over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from penstock.algorithms.advantages.types import AdvantageInputs


@dataclass(frozen=True)
class Row:
    """One sequence as lists: only its counted tokens, with where each stands among all tokens of the batch."""

    group: int
    agent: int
    reward: float
    token_rewards: list[float]
    values: list[float]
    old_logprobs: list[float]
    baseline: float
    parts: dict[str, float]
    places: list[int]

    @property
    def score(self) -> float:
        """Everything that the row earned."""
        return self.reward + sum(self.token_rewards)

    def returns(self, gamma: float = 1.0) -> list[float]:
        """Reward still to come at each counted token."""
        earned = list(self.token_rewards)
        if earned:
            earned[-1] += self.reward
        return [
            sum(gamma**k * reward for k, reward in enumerate(earned[start:]))
            for start in range(len(self.token_rewards))
        ]


def ragged_batch(seed: int = 0, rows: int = 40) -> AdvantageInputs:
    """Rows of 0 to 12 tokens in interleaved groups of 1 to about 8, a third of the tokens observations.

    Row 3 is fully masked, row 5 has no token, the last row is alone in its group. Rewards come in tenths, so that ties
    occur; one row lacks a part of its reward.
    """
    generator = np.random.default_rng(seed)
    lengths_B = generator.integers(1, 13, rows)
    lengths_B[5] = 0
    offsets_B1 = np.concatenate(([0], np.cumsum(lengths_B)))
    tokens = offsets_B1[-1]
    mask_T = (generator.random(tokens) < 0.66).astype(np.float32)
    mask_T[offsets_B1[3] : offsets_B1[4]] = 0
    groups_B = generator.integers(-2, 7, rows)
    groups_B[-1] = 99
    parts_B = {name: generator.integers(0, 5, rows) / 10 for name in ("right", "form")}
    parts_B["form"][7] = np.nan
    return AdvantageInputs(
        rewards_B=generator.integers(0, 10, rows) / 10,
        token_rewards_T=generator.normal(size=tokens),
        mask_T=mask_T,
        offsets_B1=offsets_B1,
        groups_B=groups_B,
        values_T=generator.normal(size=tokens),
        old_logprobs_T=-generator.exponential(size=tokens),
        baselines_B=generator.integers(0, 10, rows) / 10,
        parts_B=parts_B,
        agents_B=np.arange(rows) % 3,
    )


def without_token_rewards(inputs: AdvantageInputs) -> AdvantageInputs:
    """The batch with rewards of whole sequences alone."""
    return dataclasses.replace(inputs, token_rewards_T=np.zeros_like(inputs.token_rewards_T))


def rows_of(inputs: AdvantageInputs) -> list[Row]:
    """The batch as a list of rows."""
    rows = []
    for index in range(len(inputs.rewards_B)):
        span = range(int(inputs.offsets_B1[index]), int(inputs.offsets_B1[index + 1]))
        places = [place for place in span if inputs.mask_T[place] > 0]
        rows.append(
            Row(
                group=int(inputs.groups_B[index]),
                agent=int(inputs.agents_B[index]),
                reward=float(inputs.rewards_B[index]),
                token_rewards=[float(inputs.token_rewards_T[place]) for place in places],
                values=[float(inputs.values_T[place]) for place in places],
                old_logprobs=[float(inputs.old_logprobs_T[place]) for place in places],
                baseline=float(inputs.baselines_B[index]),
                parts={name: float(part_B[index]) for name, part_B in inputs.parts_B.items()},
                places=places,
            )
        )
    return rows


def take(inputs: AdvantageInputs, order: np.ndarray) -> AdvantageInputs:
    """Some rows of a batch, in the order given."""
    spans = [np.arange(inputs.offsets_B1[row], inputs.offsets_B1[row + 1]) for row in order]
    tokens = np.concatenate(spans) if spans else np.zeros(0, int)
    return AdvantageInputs(
        rewards_B=inputs.rewards_B[order],
        token_rewards_T=inputs.token_rewards_T[tokens],
        mask_T=inputs.mask_T[tokens],
        offsets_B1=np.concatenate(([0], np.cumsum([len(span) for span in spans]))).astype(int),
        groups_B=inputs.groups_B[order],
        values_T=inputs.values_T[tokens],
        old_logprobs_T=inputs.old_logprobs_T[tokens],
        baselines_B=inputs.baselines_B[order],
        parts_B={name: part_B[order] for name, part_B in inputs.parts_B.items()},
        agents_B=inputs.agents_B[order],
    )
