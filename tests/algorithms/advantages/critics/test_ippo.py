"""Independent PPO beside PPO: the same with one agent, and with two no agent hears of the other's rewards.

Its formula is compared in test_advantages.py, with those of all estimators.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from penstock.algorithms.advantages.critics.gae import gae
from penstock.algorithms.advantages.critics.ippo import ippo
from penstock.algorithms.advantages.types import AdvantageInputs

OFFSETS_B1 = np.array([0, 3, 5, 5, 9, 10])
AGENTS_B = np.array([0, 1, 0, 1, 0])
INPUTS = AdvantageInputs(
    rewards_B=np.array([1.0, 0.0, 5.0, 0.5, 0.25]),
    token_rewards_T=np.array([0.0, 0.1, 0, 0, 0, -0.2, 0, 0, 0, 0]),
    mask_T=np.array([1, 1, 0, 1, 1, 1, 0, 1, 1, 1]),
    offsets_B1=OFFSETS_B1,
    groups_B=np.array([0, 0, 1, 1, 2]),
    values_T=np.array([0.5, 0.2, 9, 0.1, 0.4, 0.3, 9, 0.6, 0.9, 0.7]),
    agents_B=AGENTS_B,
)


def test_one_agent_is_ppo_bit_by_bit() -> None:
    """Also of a number other than 0. With two agents it is not: the control."""
    alone = ippo(dataclasses.replace(INPUTS, agents_B=np.full(5, 3)))
    ppo, two = gae(INPUTS), ippo(INPUTS)
    np.testing.assert_array_equal(alone.advantages_T, ppo.advantages_T)
    np.testing.assert_array_equal(alone.returns_T, ppo.returns_T)
    np.testing.assert_array_equal(two.returns_T, ppo.returns_T)
    assert not np.array_equal(two.advantages_T, ppo.advantages_T)


def test_rewards_of_one_agent_change_nothing_of_the_other() -> None:
    """One agent earns a thousand times as much. Under ppo that makes the other's advantages vanish."""
    louder = dataclasses.replace(INPUTS, rewards_B=np.where(AGENTS_B == 1, 1000.0, 1.0) * INPUTS.rewards_B)
    own_T = np.repeat(AGENTS_B == 0, np.diff(OFFSETS_B1))
    np.testing.assert_array_equal(ippo(louder).advantages_T[own_T], ippo(INPUTS).advantages_T[own_T])
    assert not np.allclose(gae(louder).advantages_T[own_T], gae(INPUTS).advantages_T[own_T])
