"""The algorithm of docs/algorithms.md that is in no package, and functions that are wrong in one thing each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.preference.types import PairInputs, PreferenceOutputs, log_ratio_differences

NEEDS = ("group",)


def above_median(inputs: AdvantageInputs, *, scale: float = 1.0) -> Advantages:
    """Compare a response with the median of those to its prompt."""
    scores_B = inputs.scores_B()
    medians_B = [np.median(scores_B[inputs.groups_B == group]) for group in inputs.groups_B]
    return spread_over_tokens(scale * (scores_B - medians_B), inputs)


def bounded(inputs: PolicyLossInputs, *, steepness: float = 1.0) -> PolicyLossOutputs:
    """Bound the ratio smoothly; its gradient at ratio 1 is that of the policy gradient."""
    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).exp()
    loss_T = -inputs.advantages_T * ((ratio_T - 1) * steepness).tanh() / steepness
    return PolicyLossOutputs(loss_T, {"ratio": ratio_T.detach()})


def pull(inputs: PairInputs, *, strength: Annotated[float, Gt(0)] = 1.0) -> PreferenceOutputs:
    """Pull the difference of log-ratios to `strength`."""
    difference_P = log_ratio_differences(inputs)
    return PreferenceOutputs((difference_P - strength).square(), difference_P.detach())


def namesake(inputs: PolicyLossInputs, *, temperature: float = 0.5, clip_low: float = 0.9, seed: int = 7) -> Any:
    """Settings with names that stand for something else in a recipe, or at an iteration."""


def steeper(inputs: AdvantageInputs, *, steepness: float = 2.0, clip_low: float = 0.7) -> Advantages:
    """A setting that `bounded` has too, with another default, and a name of PPO's with other bounds."""
    return spread_over_tokens(steepness * inputs.scores_B(), inputs)


def alike(inputs: AdvantageInputs, *, clip_low: Annotated[float, Ge(0)] = 0.2) -> Advantages:
    """A setting that means the same as PPO's."""
    return spread_over_tokens(inputs.scores_B().clip(max=clip_low), inputs)


def annotated(
    inputs: AdvantageInputs,
    *,
    least: Annotated[float, Gt(0)] = 0.5,
    kind: Literal["up", "down"] = "up",
    anything=None,  # type: ignore[no-untyped-def]
) -> Advantages:
    """Settings of several types."""
    return spread_over_tokens(least * inputs.scores_B(), inputs)


def without_default(inputs: AdvantageInputs, *, margin: float) -> Advantages:
    """A setting that a recipe must give."""
    return spread_over_tokens(inputs.scores_B() - margin, inputs)


def odd_default(inputs: AdvantageInputs, *, edges: tuple[int, int] = (0, 1)) -> Advantages:
    """A default that YAML cannot hold."""
    return spread_over_tokens(inputs.scores_B(), inputs)


def two_inputs(rewards: Any, groups: Any) -> Any:
    """Not called as an estimator is."""
    return rewards


def raising(inputs: AdvantageInputs) -> Any:
    raise LookupError("no such column")


def plain_list(inputs: AdvantageInputs) -> Advantages:
    """Of no type of numpy's."""
    return Advantages([0.0] * len(inputs.mask_T))  # type: ignore[arg-type]


def plain_array(inputs: AdvantageInputs) -> Any:
    """No `Advantages`."""
    return inputs.rewards_B


def per_row(inputs: AdvantageInputs) -> Advantages:
    """One value per response instead of one per token."""
    return Advantages(inputs.rewards_B.astype(np.float32))


def endless(inputs: AdvantageInputs) -> Advantages:
    """Not a number."""
    return spread_over_tokens(np.full(len(inputs.rewards_B), np.nan), inputs)
