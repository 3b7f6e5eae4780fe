"""GAE against numbers worked out by hand, and against a padded, looped float64 computation of its own.

Invariants: observations change nothing, rows do not touch each other, and lambda = 1 gives Monte-Carlo returns.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.algorithms.advantages.critics.gae import gae
from penstock.algorithms.advantages.types import AdvantageInputs


def one_row(
    values: list[float], mask: list[int], reward: float, token_rewards: list[float] | None = None
) -> AdvantageInputs:
    return AdvantageInputs(
        rewards_B=np.array([reward]),
        token_rewards_T=np.array(token_rewards or [0.0] * len(values)),
        mask_T=np.array(mask),
        offsets_B1=np.array([0, len(values)]),
        groups_B=np.array([0]),
        values_T=np.array(values),
    )


def ragged_batch(seed: int = 0, rows: int = 40) -> AdvantageInputs:
    """Rows of 0 to 12 tokens, about a third of them observations, some rows with nothing but observations."""
    generator = np.random.default_rng(seed)
    offsets_B1 = np.concatenate(([0], np.cumsum(generator.integers(0, 13, rows))))
    tokens = offsets_B1[-1]
    mask_T = (generator.random(tokens) < 0.66).astype(np.float32)
    mask_T[offsets_B1[3] : offsets_B1[4]] = 0
    return AdvantageInputs(
        rewards_B=generator.normal(size=rows),
        token_rewards_T=generator.normal(size=tokens) * mask_T,
        mask_T=mask_T,
        offsets_B1=offsets_B1,
        groups_B=np.arange(rows) // 4,
        values_T=generator.normal(size=tokens),
    )


def looped(inputs: AdvantageInputs, gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    """Padded reference: a (rows, longest) grid walked token by token, observations stepped over."""
    starts, ends = inputs.offsets_B1[:-1], inputs.offsets_B1[1:]
    grid = np.zeros((len(starts), max(ends - starts), 2))
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        next_value, next_advantage, last = 0.0, 0.0, True
        for t in range(end - start - 1, -1, -1):
            token = start + t
            if not inputs.mask_T[token]:
                continue
            reward = inputs.token_rewards_T[token] + (inputs.rewards_B[row] if last else 0.0)
            last = False
            value = inputs.values_T[token]
            next_advantage = reward + gamma * next_value - value + gamma * gae_lambda * next_advantage
            next_value = value
            grid[row, t] = next_advantage, next_advantage + value
    packed = np.concatenate([grid[row, :length] for row, length in enumerate(ends - starts)])
    return packed[:, 0], packed[:, 1]


def test_three_tokens_by_hand() -> None:
    """gamma 0.9, lambda 0.5, so decay 0.45; values 1, 2, 3; reward 10 at the end.

    deltas: 0.9 * 2 - 1 = 0.8; 0.9 * 3 - 2 = 0.7; 10 - 3 = 7.
    advantages, from the end: 7; 0.7 + 0.45 * 7 = 3.85; 0.8 + 0.45 * 3.85 = 2.5325.
    """
    result = gae(one_row([1, 2, 3], [1, 1, 1], 10), gamma=0.9, gae_lambda=0.5, whiten=False)
    np.testing.assert_allclose(result.advantages_T, [2.5325, 3.85, 7], rtol=1e-6)
    np.testing.assert_allclose(result.returns_T, [3.5325, 5.85, 10], rtol=1e-6)
    assert result.advantages_T.dtype == result.returns_T.dtype == np.float32


def test_multi_turn_by_hand() -> None:
    """The row above with observations between, after and with values and rewards that must not be read."""
    inputs = one_row([1, 50, 2, 60, 70, 3, 80], [1, 0, 1, 0, 0, 1, 0], 10, [0, 5, 0, 0, 0, 0, 9])
    result = gae(inputs, gamma=0.9, gae_lambda=0.5, whiten=False)
    np.testing.assert_allclose(result.advantages_T, [2.5325, 0, 3.85, 0, 0, 7, 0], rtol=1e-6)
    np.testing.assert_allclose(result.returns_T, [3.5325, 0, 5.85, 0, 0, 10, 0], rtol=1e-6)


def test_token_rewards_by_hand() -> None:
    """gamma = lambda = 1, values 0: the advantage is the reward still to come, 1 + 2 + (4 + 8), 2 + 12, 12."""
    result = gae(one_row([0, 0, 0], [1, 1, 1], 8, [1, 2, 4]), gamma=1, gae_lambda=1, whiten=False)
    assert result.advantages_T.tolist() == [15, 14, 12]


def test_whitening_by_hand() -> None:
    """lambda 0, gamma 1: advantages 1, 1, 7 (deltas 2 - 1, 3 - 2, 10 - 3); mean 3, variance (4 + 4 + 16) / 2 = 12.

    The returns keep the advantages as they were: 1 + 1, 1 + 2, 7 + 3.
    """
    result = gae(one_row([1, 2, 3], [1, 1, 1], 10), gamma=1, gae_lambda=0)
    np.testing.assert_allclose(result.advantages_T, np.array([-2, -2, 4]) / 12**0.5, rtol=1e-6)
    assert result.returns_T.tolist() == [2, 3, 10]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.99, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_ragged_batch_equals_the_loop(gamma: float, gae_lambda: float) -> None:
    inputs = ragged_batch()
    result = gae(inputs, gamma=gamma, gae_lambda=gae_lambda, whiten=False)
    advantages_T, returns_T = looped(inputs, gamma, gae_lambda)
    np.testing.assert_array_equal(result.advantages_T, advantages_T.astype(np.float32))
    np.testing.assert_array_equal(result.returns_T, returns_T.astype(np.float32))


def test_whitened_batch_has_mean_zero_and_variance_one_over_counted_tokens() -> None:
    inputs = ragged_batch()
    result = gae(inputs)
    counted = result.advantages_T[inputs.mask_T > 0].astype(np.float64)
    assert abs(counted.mean()) < 1e-7
    assert abs(counted.var(ddof=1) - 1) < 1e-6
    assert not result.advantages_T[inputs.mask_T == 0].any()


def test_rows_do_not_touch_each_other() -> None:
    """A row alone gives what it gives in the batch; bit for bit, as sorting by length only reorders rows."""
    inputs = ragged_batch()
    together = gae(inputs, whiten=False).advantages_T
    for row, (start, end) in enumerate(zip(inputs.offsets_B1[:-1], inputs.offsets_B1[1:], strict=True)):
        alone = AdvantageInputs(
            inputs.rewards_B[row : row + 1],
            inputs.token_rewards_T[start:end],
            inputs.mask_T[start:end],
            np.array([0, end - start]),
            np.array([0]),
            inputs.values_T[start:end],
        )
        np.testing.assert_array_equal(gae(alone, whiten=False).advantages_T, together[start:end])


def test_lambda_one_gives_monte_carlo_returns_whatever_the_critic_says() -> None:
    inputs = ragged_batch()
    other = dataclasses.replace(inputs, values_T=inputs.values_T + 3)
    settings = {"gamma": 0.97, "gae_lambda": 1.0, "whiten": False}
    np.testing.assert_allclose(gae(inputs, **settings).returns_T, gae(other, **settings).returns_T, atol=1e-5)


def test_control_the_critic_matters_below_lambda_one() -> None:
    """Negative control for the test above."""
    inputs = ragged_batch()
    other = dataclasses.replace(inputs, values_T=inputs.values_T + 3)
    settings = {"gamma": 0.97, "gae_lambda": 0.5, "whiten": False}
    assert np.abs(gae(inputs, **settings).returns_T - gae(other, **settings).returns_T).max() > 0.1


def test_control_padding_by_observations_as_counted_tokens_is_wrong() -> None:
    """Negative control: reading the observations of the multi-turn row as its own tokens changes the first token."""
    inputs = one_row([1, 50, 2, 60, 70, 3], [1, 1, 1, 1, 1, 1], 10)
    assert abs(gae(inputs, gamma=0.9, gae_lambda=0.5, whiten=False).advantages_T[0] - 2.5325) > 1


def test_rows_and_batches_without_tokens() -> None:
    empty = AdvantageInputs(np.ones(2), np.zeros(0), np.zeros(0), np.array([0, 0, 0]), np.zeros(2, int), np.zeros(0))
    assert gae(empty).advantages_T.size == 0
    masked = one_row([1, 2], [0, 0], 5)
    assert gae(masked).advantages_T.tolist() == gae(masked).returns_T.tolist() == [0, 0]


def test_values_are_required() -> None:
    with pytest.raises(ValueError, match="critic's values"):
        gae(dataclasses.replace(ragged_batch(), values_T=None))
