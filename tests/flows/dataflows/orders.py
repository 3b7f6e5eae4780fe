"""Dataflows and rewards as a user would write them; worker processes import this module from the working directory."""

from __future__ import annotations

import numpy as np

from penstock import Iteration

BONUS = 0.5


def usual(step: Iteration) -> None:
    """The usual steps, with looks at the batch between them that change nothing."""
    step.rollout()
    actor, reference = step.logprobs("actor"), step.logprobs("reference")
    step.log("own/kl", float(np.mean(actor.values_T - reference.values_T)))
    step.reward()
    assert len(step.read("response")["response"]) == len(actor)
    step.advantage()
    step.update()


def with_bonus(step: Iteration) -> None:
    """The recipe's reward, and a second one by a function, added with a weight."""
    step.rollout()
    step.reward()
    step.add_reward("short", "orders:short", weight=BONUS, settings={"limit": 3})
    step.advantage()
    step.update()


def with_numbers(step: Iteration) -> None:
    """The same in numbers that the dataflow works out by itself."""
    step.rollout()
    step.reward()
    step.add_reward("short", [short(text, 3) for text in step.read("response")["response"]], weight=BONUS)
    step.advantage()
    step.update()


def without_update(step: Iteration) -> None:
    """Nothing is learnt; log-probs are looked at, which leave nothing behind."""
    step.rollout()
    step.reward()
    step.logprobs()


def low(response: str) -> float:
    """1 for about half of what an untrained policy says, so that there is something to learn at once."""
    return float(response[:1] in ("0", "1", "2", "3", "4"))


def short(response: str, limit: int) -> float:
    """Whether a response has at most `limit` characters."""
    return float(len(response) <= limit)


def both(response: str) -> float:
    """Both rewards in one."""
    return low(response) + BONUS * short(response, 3)
