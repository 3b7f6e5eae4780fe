"""Every advantage estimator against numbers worked out by hand and against loops written from its paper's formula.

Invariants of all: 0 where the mask is 0; rows may come in any order; what cannot be compared teaches exactly nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.advantages.types import AdvantageInputs
from tests.algorithms.advantages.batches import Row, ragged_batch, rows_of, take, without_token_rewards

Expected = list[list[float]]  # per row, per counted token


# ---- the formulas, written out ---------------------------------------------------------------------------------------


def group_of(rows: list[Row], row: Row) -> list[Row]:
    return [other for other in rows if other.group == row.group]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def over_tokens(rows: list[Row], advantage: Callable[[Row], float]) -> Expected:
    return [[advantage(row)] * len(row.places) for row in rows]


def normalised(expected: Expected) -> Expected:
    """Over all counted tokens: mean 0, unbiased variance 1."""
    flat = [value for row in expected for value in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in expected]


def gae(rows: list[Row], gamma: float, gae_lambda: float, whiten: bool) -> Expected:
    """The sum itself, (gamma lambda)^k delta_(t+k), not its recursion."""
    expected = []
    for row in rows:
        rewards = [*row.token_rewards[:-1], row.token_rewards[-1] + row.reward] if row.places else []
        values = [*row.values, 0.0]
        deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        expected.append(
            [sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        )
    return normalised(expected) if whiten else expected


def ippo(rows: list[Row], gamma: float, gae_lambda: float, whiten: bool) -> Expected:
    """gae of each agent's rows as if there were no others."""
    expected: Expected = [[] for _ in rows]
    for agent in {row.agent for row in rows}:
        own = [place for place, row in enumerate(rows) if row.agent == agent]
        for place, values in zip(own, gae([rows[place] for place in own], gamma, gae_lambda, whiten), strict=True):
            expected[place] = values
    return expected


def grpo(rows: list[Row], normalize_by_std: bool) -> Expected:
    def advantage(row: Row) -> float:
        scores = [other.score for other in group_of(rows, row)]
        divisor = deviation(scores) + 1e-6 if normalize_by_std else 1.0
        return (row.score - statistics.fmean(scores)) / divisor

    return over_tokens(rows, advantage)


def rloo(rows: list[Row]) -> Expected:
    def advantage(row: Row) -> float:
        others = [other.score for other in group_of(rows, row) if other is not row]
        return row.score - statistics.fmean(others) if others else 0.0

    return over_tokens(rows, advantage)


def returns(rows: list[Row], gamma: float, whiten: bool) -> Expected:
    expected = [row.returns(gamma) for row in rows]
    return normalised(expected) if whiten else expected


def reinforce_pp_baseline(rows: list[Row]) -> Expected:
    mean = {row.group: statistics.fmean(other.score for other in group_of(rows, row)) for row in rows}
    return normalised(over_tokens(rows, lambda row: row.score - mean[row.group]))


def remax(rows: list[Row]) -> Expected:
    return [[value - row.baseline for value in row.returns()] for row in rows]


def opo(rows: list[Row]) -> Expected:
    def advantage(row: Row) -> float:
        group = group_of(rows, row)
        return row.score - sum(len(o.places) * o.score for o in group) / sum(len(o.places) for o in group)

    return [[advantage(row)] * len(row.places) if row.places else [] for row in rows]


def gpg(rows: list[Row]) -> Expected:
    silent = sum(len({other.score for other in group_of(rows, row)}) == 1 for row in rows)
    factor = len(rows) / (len(rows) - silent)
    return over_tokens(
        rows, lambda row: factor * (row.score - statistics.fmean(other.score for other in group_of(rows, row)))
    )


def pass_at_k(rows: list[Row], normalize_by_std: bool) -> Expected:
    def advantage(row: Row) -> float:
        group = [other.score for other in group_of(rows, row)]
        others = [other.score for other in group_of(rows, row) if other is not row]
        gain = max(group) - max(others) if others else 0.0
        return gain / (deviation(group) + 1e-6) if normalize_by_std else gain

    return over_tokens(rows, advantage)


def gdpo(rows: list[Row], part_weights: dict[str, float] | None) -> Expected:
    def summed(row: Row) -> float:
        total = 0.0
        for name, weight in (part_weights or dict.fromkeys(row.parts, 1.0)).items():
            values = [other.parts[name] for other in group_of(rows, row) if not math.isnan(other.parts[name])]
            if not math.isnan(row.parts[name]):
                total += weight * (row.parts[name] - statistics.fmean(values)) / (deviation(values) + 1e-6)
        return total

    sums = [summed(row) for row in rows]
    mean, variance = statistics.fmean(sums), statistics.variance(sums)
    return over_tokens(rows, lambda row: (sums[rows.index(row)] - mean) / math.sqrt(variance + 1e-8))


def otb(rows: list[Row]) -> Expected:
    def spent(row: Row, t: int) -> float:
        return sum((1 - math.exp(logprob)) ** 2 for logprob in row.old_logprobs[: t + 1])

    expected = []
    for row in rows:
        expected.append([])
        for t, value in enumerate(row.returns()):
            reaching = [other for other in group_of(rows, row) if len(other.places) > t]
            weights = [spent(other, t) for other in reaching]
            weighted = sum(weight * other.returns()[t] for weight, other in zip(weights, reaching, strict=True))
            expected[-1].append(value - weighted / sum(weights))
    return expected


def rft(rows: list[Row], accept_reward: float) -> Expected:
    return over_tokens(rows, lambda row: float(row.reward >= accept_reward))


def best_of_n(rows: list[Row], accept_best: int) -> Expected:
    def advantage(row: Row) -> float:
        rewards = sorted((other.reward for other in group_of(rows, row)), reverse=True)
        return float(row.reward in rewards[:accept_best] and row.reward != rewards[-1])

    return over_tokens(rows, advantage)


CASES: list[tuple[Callable[..., Expected], dict[str, Any]]] = [
    (gae, {"gamma": 0.9, "gae_lambda": 0.8, "whiten": False}),
    (gae, {"gamma": 1.0, "gae_lambda": 0.95, "whiten": True}),
    (ippo, {"gamma": 0.9, "gae_lambda": 0.8, "whiten": False}),
    (ippo, {"gamma": 1.0, "gae_lambda": 0.95, "whiten": True}),
    (grpo, {"normalize_by_std": True}),
    (grpo, {"normalize_by_std": False}),
    (rloo, {}),
    (returns, {"gamma": 0.9, "whiten": False}),
    (returns, {"gamma": 1.0, "whiten": True}),
    (reinforce_pp_baseline, {}),
    (remax, {}),
    (opo, {}),
    (gpg, {}),
    (pass_at_k, {"normalize_by_std": True}),
    (pass_at_k, {"normalize_by_std": False}),
    (gdpo, {"part_weights": None}),
    (gdpo, {"part_weights": {"form": 0.25}}),
    (otb, {}),
    (rft, {"accept_reward": 0.6}),
    (best_of_n, {"accept_best": 1}),
    (best_of_n, {"accept_best": 3}),
]
GROUPED = sorted(set(ADVANTAGES) - {"gae", "ippo", "returns", "remax", "rft"})


def case_name(value: Any) -> str:
    return value.__name__ if callable(value) else ",".join(f"{name}={setting}" for name, setting in value.items())


@pytest.mark.parametrize("token_rewards", [True, False], ids=["token-rewards", "sequence-rewards"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("formula", "settings"), CASES, ids=case_name)
def test_equals_the_formula(
    formula: Callable[..., Expected], settings: dict[str, Any], seed: int, token_rewards: bool
) -> None:
    """On ragged rows with observations, ties, a row without a token, a fully masked one and a group of one."""
    inputs = ragged_batch(seed) if token_rewards else without_token_rewards(ragged_batch(seed))
    rows = rows_of(inputs)
    expected_T = np.zeros(inputs.mask_T.size)
    for row, values in zip(rows, formula(rows, **settings), strict=True):
        expected_T[row.places] = values
    result = ADVANTAGES[formula.__name__](inputs, **settings)
    np.testing.assert_allclose(result.advantages_T, expected_T, rtol=1e-6, atol=1e-6)
    assert result.advantages_T.dtype == np.float32
    assert not result.advantages_T[inputs.mask_T == 0].any()
    assert np.abs(expected_T).max() > 0.1


def test_every_estimator_is_compared_with_its_formula() -> None:
    assert {formula.__name__ for formula, _ in CASES} == set(ADVANTAGES)


# ---- by hand ---------------------------------------------------------------------------------------------------------

# One prompt, four answers worth 1, 2, 6, 3 with 2, 1, 1, 4 tokens; a token's old probability is 1/2, so it spends 1/4.
HAND = AdvantageInputs(
    rewards_B=np.array([1.0, 2.0, 6.0, 3.0]),
    token_rewards_T=np.zeros(8),
    mask_T=np.ones(8),
    offsets_B1=np.array([0, 2, 3, 4, 8]),
    groups_B=np.zeros(4, dtype=int),
    values_T=np.zeros(8),
    old_logprobs_T=np.full(8, math.log(0.5)),
    baselines_B=np.full(4, 2.0),
    parts_B={"right": np.array([0.0, 0.0, 4.0, 4.0]), "form": np.array([1.0, 1.0, 1.0, 1.0])},
    agents_B=np.array([0, 1, 1, 0]),
)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("rloo", {}, [1 - 11 / 3] * 2 + [2 - 10 / 3] + [6 - 2] + [3 - 3] * 4),
        ("opo", {}, [1 - 22 / 8] * 2 + [2 - 22 / 8] + [6 - 22 / 8] + [3 - 22 / 8] * 4),  # 2 + 2 + 6 + 12 over 8
        ("gpg", {}, [-2] * 2 + [-1] + [3] + [0] * 4),
        ("pass_at_k", {"normalize_by_std": False}, [0, 0, 0, 3, 0, 0, 0, 0]),
        ("remax", {}, [-1] * 2 + [0] + [4] + [1] * 4),
        ("rft", {"accept_reward": 3.0}, [0] * 3 + [1] * 5),
        ("best_of_n", {}, [0] * 3 + [1] + [0] * 4),
        ("best_of_n", {"accept_best": 2}, [0] * 3 + [1] * 5),
        ("best_of_n", {"accept_best": 9}, [0] * 2 + [1] * 6),  # all but the worst
        ("returns", {}, [1] * 2 + [2] + [6] + [3] * 4),
        ("returns", {"gamma": 0.5}, [0.5, 1, 2, 6, 0.375, 0.75, 1.5, 3]),
        # Position 0: all four, weights equal. Position 1: rows 0 and 3, weights equal. Then row 3 is alone.
        ("otb", {}, [1 - 3, 1 - 2, 2 - 3, 6 - 3, 3 - 3, 3 - 2, 0, 0]),
        # right: deviations -2, -2, 2, 2, unbiased spread sqrt(16 / 3); form is equal. Again normalised: sqrt(3 / 4).
        ("gdpo", {}, [-math.sqrt(0.75)] * 3 + [math.sqrt(0.75)] * 5),
        # Over 8 tokens -2, -2, -1, 3, 0, 0, 0, 0: mean -1/4, squares 18 - 8/16, variance 17.5 / 7 = 2.5.
        ("reinforce_pp_baseline", {}, [value / math.sqrt(2.5) for value in [-1.75] * 2 + [-0.75, 3.25] + [0.25] * 4]),
    ],
)
def test_by_hand(name: str, settings: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(ADVANTAGES[name](HAND, **settings).advantages_T, expected, rtol=1e-5, atol=1e-6)


# ---- properties of all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6 / 3])
def test_equal_rewards_teach_exactly_nothing(name: str, reward: float) -> None:
    """Whatever the reward, the size of the groups and the lengths: 0, not a rounding error blown up."""
    inputs = without_token_rewards(ragged_batch())
    rewards_B = np.full(len(inputs.rewards_B), reward)
    equal = dataclasses.replace(inputs, rewards_B=rewards_B, parts_B={"right": rewards_B, "form": rewards_B})
    assert not ADVANTAGES[name](equal).advantages_T.any()


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_one_teach_exactly_nothing(name: str) -> None:
    inputs = ragged_batch()
    alone = dataclasses.replace(inputs, groups_B=np.arange(len(inputs.rewards_B)))
    assert not ADVANTAGES[name](alone).advantages_T.any()


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"reinforce_pp_baseline", "gdpo"}))
def test_a_group_of_one_among_others_teaches_exactly_nothing(name: str) -> None:
    """The other two normalise over the batch afterwards: 0 is shifted with all the rest."""
    inputs = ragged_batch()
    advantages_T = ADVANTAGES[name](inputs).advantages_T
    last = slice(inputs.offsets_B1[-2], inputs.offsets_B1[-1])
    assert inputs.mask_T[last].any()
    assert not advantages_T[last].any()
    assert advantages_T.any()


@pytest.mark.parametrize("name", ["returns", "gae"])
def test_equal_tokens_become_exactly_nothing_by_whitening(name: str) -> None:
    inputs = dataclasses.replace(HAND, rewards_B=np.full(4, 0.1))
    settings = {"gae_lambda": 1.0} if name == "gae" else {}
    assert not ADVANTAGES[name](inputs, whiten=True, **settings).advantages_T.any()
    assert ADVANTAGES[name](inputs, whiten=False, **settings).advantages_T.all()


def test_a_sample_like_the_greedy_response_teaches_exactly_nothing() -> None:
    assert not ADVANTAGES["remax"](dataclasses.replace(HAND, baselines_B=HAND.rewards_B)).advantages_T.any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_batches_in_which_nothing_counts(name: str) -> None:
    """Fully masked rows, rows without tokens, and no row at all."""
    inputs = ragged_batch()
    masked = dataclasses.replace(inputs, mask_T=np.zeros_like(inputs.mask_T))
    assert not ADVANTAGES[name](masked).advantages_T.any()
    for order in (np.array([5, 5]), np.zeros(0, dtype=int)):
        assert ADVANTAGES[name](take(inputs, order)).advantages_T.size == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_is_masked_is_not_read(name: str) -> None:
    inputs = ragged_batch()
    masked = inputs.mask_T == 0
    changed = dataclasses.replace(
        inputs,
        token_rewards_T=np.where(masked, 1e3, inputs.token_rewards_T),
        values_T=np.where(masked, -1e3, inputs.values_T),
        old_logprobs_T=np.where(masked, -30.0, inputs.old_logprobs_T),
    )
    np.testing.assert_array_equal(ADVANTAGES[name](changed).advantages_T, ADVANTAGES[name](inputs).advantages_T)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rows_may_come_in_any_order(name: str) -> None:
    inputs = ragged_batch()
    order = np.random.default_rng(3).permutation(len(inputs.rewards_B))
    straight = rows_of(inputs)
    shuffled = rows_of(take(inputs, order))
    first_T = ADVANTAGES[name](inputs).advantages_T
    second_T = ADVANTAGES[name](take(inputs, order)).advantages_T
    for place, row in enumerate(order):
        np.testing.assert_allclose(second_T[shuffled[place].places], first_T[straight[row].places], atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"gdpo"}))
def test_control_a_better_answer_is_told_apart(name: str) -> None:
    """Negative control: raising one reward of a group changes its advantage, and upwards."""
    raised = dataclasses.replace(HAND, rewards_B=HAND.rewards_B + np.array([0, 0, 0, 9]))
    assert ADVANTAGES[name](raised).advantages_T[4] > ADVANTAGES[name](HAND).advantages_T[4]


# ---- of single estimators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rft", "best_of_n"])
def test_the_loss_counts_accepted_rows_alone(name: str) -> None:
    """Row by row what the advantages say, also for a row without a counted token; other estimators accept all."""
    inputs = ragged_batch()
    result = ADVANTAGES[name](inputs, **{"rft": {"accept_reward": 0.6}}.get(name, {}))
    assert result.accepted_B is not None
    for row, accepted in zip(rows_of(inputs), result.accepted_B, strict=True):
        assert all(result.advantages_T[place] == accepted for place in row.places)
    assert 0 < result.accepted_B.sum() < len(result.accepted_B)
    assert ADVANTAGES["grpo"](inputs).accepted_B is None


def test_best_of_n_takes_all_that_tie_and_none_where_all_tie() -> None:
    """Rewards 2, 2, 1, 0 and 1, 1 and 5: both twos, none of the equal ones, and none of a group of one."""
    rewards_B, groups_B = np.array([2.0, 2.0, 1.0, 0.0, 1.0, 1.0, 5.0]), np.array([0, 0, 0, 0, 1, 1, 2])
    inputs = AdvantageInputs(rewards_B, np.zeros(7), np.ones(7), np.arange(8), groups_B)
    assert ADVANTAGES["best_of_n"](inputs).advantages_T.tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert ADVANTAGES["best_of_n"](inputs, accept_best=3).advantages_T.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert ADVANTAGES["rft"](inputs).advantages_T.tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert not ADVANTAGES["rft"](inputs, accept_reward=5.5).advantages_T.any()


def test_dr_grpo_is_rloo_scaled() -> None:
    """(R - mean) n / (n - 1) is R - mean of the others: the two differ by a factor of the group's size alone."""
    ratio = ADVANTAGES["grpo"](HAND, normalize_by_std=False).advantages_T / 0.75
    np.testing.assert_allclose(ADVANTAGES["rloo"](HAND).advantages_T, ratio, atol=1e-6)


def test_gpg_is_not_diluted_by_groups_without_spread() -> None:
    """Four more rows of one reward: a mean over rows would halve the gradient, the factor 8 / 4 restores it."""
    twice = take(HAND, np.array([0, 1, 2, 3, 0, 0, 0, 0]))
    twice = dataclasses.replace(twice, groups_B=np.array([0] * 4 + [1] * 4))
    np.testing.assert_allclose(ADVANTAGES["gpg"](twice).advantages_T[:8], 2 * ADVANTAGES["gpg"](HAND).advantages_T)


def test_the_proxy_of_otb_is_at_least_half_of_the_papers() -> None:
    """1 - 2 p + sum p^2 = (1 - p)^2 + what the others' squares add, which is at most (1 - p)^2 again."""
    for p in np.random.default_rng(0).dirichlet(np.full(6, 0.3), 200):
        whole = 1 - 2 * p[0] + (p**2).sum()
        assert (1 - p[0]) ** 2 <= whole + 1e-12 <= 2 * (1 - p[0]) ** 2 + 1e-11


def test_otb_without_any_gradient_spent_weighs_rows_alike() -> None:
    certain = dataclasses.replace(HAND, old_logprobs_T=np.zeros(8))
    np.testing.assert_allclose(ADVANTAGES["otb"](certain).advantages_T[[0, 2, 3, 4]], [-2, -1, 3, 0])


def test_parts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no part colour; there are right, form"):
        ADVANTAGES["gdpo"](HAND, part_weights={"colour": 1.0})
    with pytest.raises(ValueError, match="have none"):
        ADVANTAGES["gdpo"](dataclasses.replace(HAND, parts_B={}))


@pytest.mark.parametrize(
    ("name", "field"),
    [("gae", "values_T"), ("ippo", "agents_B"), ("remax", "baselines_B"), ("otb", "old_logprobs_T")],
)
def test_what_an_estimator_needs_is_required(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs"):
        ADVANTAGES[name](dataclasses.replace(HAND, **{field: None}))
