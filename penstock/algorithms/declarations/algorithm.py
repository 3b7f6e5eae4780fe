"""What an algorithm is to the rest of the program: which functions it pairs, and with which values.

A file below ``advantages/`` or ``policy_losses/`` declares the algorithms that it makes as ``ALGORITHMS``.
``penstock.algorithms.registry`` collects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# What a file's function needs beyond rewards and the current log-probs; the file declares it as ``NEEDS``.
Need = Literal[
    "critic",  # values of a trained critic
    "agent",  # the agent that a row is for: each has a critic of its own
    "group",  # at least two samples of a prompt
    "greedy",  # the reward of a greedy response to the prompt
    "reward_parts",  # the parts that a reward is the sum of; token rewards are not read
    "whole_rewards",  # rewards of whole responses alone: token rewards are not read
    "old_logprobs",  # log-probs under the generating policy, also where the update is on-policy
]


@dataclass(frozen=True)
class Algorithm:
    """A named pair of advantage estimator and policy loss.

    Args:
        name: what a config calls it.
        advantage: key of ``penstock.algorithms.advantages.ADVANTAGES``.
        policy_loss: key of ``penstock.algorithms.policy_losses.POLICY_LOSSES``.
        description: one line for a person who chooses.
        paper: where it is from: arXiv numbers, or name and year.
        aggregation: how it makes one loss of the token losses, unless a config says otherwise.
        defaults: settings whose default is another than that of the function.
    """

    name: str
    advantage: str
    policy_loss: str
    description: str
    paper: str = ""
    aggregation: str = "token-mean"
    defaults: Mapping[str, Any] = field(default_factory=dict)
