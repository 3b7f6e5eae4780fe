"""Numerical faults: which figure of an iteration is beyond its limit, and what follows from that; pure functions.

What is known before an iteration's update, the rewards and often the KL to the reference, is judged before it; the rest
after it. KL to the reference and entropy are those of the policy that gave the batch, so it was the update of the
iteration before that went too far: going back undoes that one, too.

A figure that is NaN is beyond every limit. Of the faults that a run had the report shows a row each. Left out: carrying
it out (penstock/tasks/iteration/faults.py), and gradients that are not finite, which are known on the ranks alone
(penstock/engines/training/trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.configs.sections.faults import SKIPPED_IN_A_ROW, FaultsConfig
from penstock.state.events import FAULT as EVENT

Figures = Mapping[str, float]

FAULT = "fault/"  # before the name of a fault, as the figure of an iteration that had it
UNDONE = "update/undone"  # figure of an iteration without an effect on the weights: the iteration that decided so
KL, UPDATE_KL, ENTROPY, REWARD = "actor/kl", "actor/approx_kl", "actor/entropy", "reward/mean"
BEST_OF, MEAN_OVER = 30, 5  # iterations among which the best mean reward is looked for, and iterations of that mean


@dataclass(frozen=True)
class Fault:
    """A figure beyond its limit.

    Attributes:
        name: as in `faults`.
        figure: the metric's name.
        says: what is wrong, with figure and limit.
        undone: newest iterations whose updates are to have no effect, where the action is not to stop.
        known_before: the iteration's own update has not been.
    """

    name: str
    figure: str
    value: float
    says: str
    action: Literal["stop", "skip", "rollback"]
    undone: int
    known_before: bool


@dataclass(frozen=True)
class Told:
    """A fault that a run had, in words: its name, when, what was wrong, and what followed."""

    what: str
    when: str
    why: str
    then: str


FOLLOWED = {"skip": "passed over", "rollback": "undone", "stop": "the training ended"}


def faults_of(events: Sequence[Mapping[str, Any]]) -> list[Told]:
    """Return the numerical faults among the events of a run, the oldest first."""
    return [
        Told(event["name"], f"iteration {event['iteration']}", event["says"], FOLLOWED[event["action"]])
        for event in events
        if event["event"] == EVENT
    ]


def fault_before(config: FaultsConfig, history: Sequence[Figures], figures: Figures) -> Fault | None:
    """Return what is wrong with a batch from which nothing has been learnt yet.

    Args:
        history: figures of the iterations before, the oldest first.
        figures: those of the iteration, without its update's.
    """
    if config.reward is not None and (fault := _reward_fault(config, history, figures)) is not None:
        return fault
    return _kl_fault(config, figures, known_before=True) if KL in figures else None


def fault_after(config: FaultsConfig, figures: Figures, kl_known_before: bool) -> Fault | None:
    """Return what is wrong with an iteration after its update; None, too, where it took no step."""
    if not kl_known_before and KL in figures and (fault := _kl_fault(config, figures, known_before=False)) is not None:
        return fault
    of_update = config.update_kl
    if of_update is not None and UPDATE_KL in figures and not figures[UPDATE_KL] <= of_update.limit:
        value = figures[UPDATE_KL]
        says = f"the policy moved by a KL of {value:.4g} nats per token within its updates (limit: {of_update.limit:g})"
        return Fault("update_kl", UPDATE_KL, value, says, of_update.action, undone=1, known_before=False)
    entropy = config.entropy
    if entropy is not None and ENTROPY in figures and not figures[ENTROPY] >= entropy.limit:
        value = figures[ENTROPY]
        says = f"the entropy is {value:.4g} nats per token (not to be below {entropy.limit:g})"
        return Fault("entropy", ENTROPY, value, says, entropy.action, undone=2, known_before=False)
    return None


def in_a_row(history: Sequence[Figures]) -> int:
    """Return how many of the newest iterations had a fault each."""
    count = 0
    for figures in reversed(history):
        if not any(name.startswith(FAULT) for name in figures):
            break
        count += 1
    return count


def too_many(history: Sequence[Figures]) -> bool:
    """Whether a fault after this history is one too many in a row, so that skipping or going back does not help."""
    return in_a_row(history) + 1 >= SKIPPED_IN_A_ROW


def best_reward(history: Sequence[Figures]) -> float | None:
    """Return the best mean reward of 5 iterations in a row among the last 30; None: there are too few."""
    rewards = np.asarray([figures[REWARD] for figures in history if REWARD in figures][-BEST_OF:], np.float64)
    if len(rewards) < MEAN_OVER:
        return None
    return float(np.convolve(rewards, np.full(MEAN_OVER, 1 / MEAN_OVER), "valid").max())


def _reward_fault(config: FaultsConfig, history: Sequence[Figures], figures: Figures) -> Fault | None:
    best, reward = best_reward(history), config.reward
    assert reward is not None
    if best is None or figures[REWARD] >= best - reward.fall:
        return None
    says = f"the mean reward is {figures[REWARD]:.4g}, and it was {best:.4g} (faults.reward.fall: {reward.fall:g})"
    return Fault("reward", REWARD, figures[REWARD], says, reward.action, undone=1, known_before=True)


def _kl_fault(config: FaultsConfig, figures: Figures, known_before: bool) -> Fault | None:
    if config.kl is None or figures[KL] <= config.kl.limit:
        return None
    says = f"the KL to the reference is {figures[KL]:.4g} nats per token (limit: {config.kl.limit:g})"
    undone = 2 if config.kl.action == "rollback" else 1
    return Fault("kl", KL, figures[KL], says, config.kl.action, undone, known_before)
