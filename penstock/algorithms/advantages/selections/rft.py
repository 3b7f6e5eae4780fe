"""Rejection-sampling fine-tuning: responses of enough reward are imitated, all others are left out.

Source: Yuan et al. 2023 (arXiv 2308.01825), on the policy's own responses to the prompts of each iteration.

Shapes: _B rows.
"""

from __future__ import annotations

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, accept
from penstock.algorithms.declarations.algorithm import Algorithm, Need

NEEDS: tuple[Need, ...] = ("whole_rewards",)

SEPARABLE = True

ALGORITHMS = (
    Algorithm(
        name="rft",
        advantage="rft",
        policy_loss="reinforce",
        description="imitates responses of enough reward and leaves the others out",
        paper="2308.01825",
    ),
)


def rft(inputs: AdvantageInputs, *, accept_reward: float = 1.0) -> Advantages:
    """A = 1 for rows with R >= accept_reward, and the loss counts these rows alone; 0 for the others.

    Nothing is compared: groups are not read, a group of one is judged like any other, and equal rewards are all
    accepted or all left out. Token rewards are not read.

    Args:
        inputs: a batch.
        accept_reward: the least reward of a response to imitate.

    Note:
        Nothing is compared. The loss counts accepted responses alone.
    """
    return accept(inputs.rewards_B >= accept_reward, inputs)
