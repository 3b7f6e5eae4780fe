"""What an algorithm is to the rest of the program: which functions it pairs and what they may be told.

A file of ``advantages/`` or ``policy_losses/`` that makes a named algorithm declares it as ``ALGORITHM``. The
collection of all of them is ``algorithms.registry``. Values of settings are not here: they belong to the configs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """A named pair of advantage estimator and policy loss.

    Args:
        name: what a config calls it.
        advantage: key of ``algorithms.advantages.ADVANTAGES``.
        policy_loss: key of ``algorithms.policy_losses.POLICY_LOSSES``.
        description: one line for a person who chooses.
        critic: whether values are needed, and so a critic is trained.
        advantage_settings: names of the estimator's settings; the registry reads them off its signature.
        loss_settings: names of the policy loss's settings; likewise.
    """

    name: str
    advantage: str
    policy_loss: str
    description: str
    critic: bool = False
    advantage_settings: tuple[str, ...] = ()
    loss_settings: tuple[str, ...] = ()
