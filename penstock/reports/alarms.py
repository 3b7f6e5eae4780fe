"""Alarms over the figures of a training: rules that say in plain words what goes wrong, and what to change.

A rule looks at the last iterations of a history: one mapping of figures per iteration, the oldest first; where nothing
is generated, at steps likewise. It needs a
run of them, never a single outlier, and is silent while there are too few; but a step that was lost is said at once.
Thresholds are the constants beside each rule; they are set so that a training that learns stays silent, also one whose
entropy falls to a quarter as it becomes sure of right answers.

Left out: stopping or changing a training, and causes that the figures do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.reports.waiting import WAITED, gains, tail_gain

History = Sequence[Mapping[str, float]]
STALENESS = "rollout/staleness_max"


@dataclass(frozen=True)
class Rule:
    """One alarm: its name, the metric without which it does not apply, when it is raised, and its two sentences."""

    name: str
    needs: str
    holds: Callable[[History], bool]
    happens: str
    change: str

    @property
    def metric(self) -> str:
        """Name under which it is recorded."""
        return f"alarm/{self.name}"


@dataclass(frozen=True)
class Alarm:
    """An alarm of a run: its sentences, the first and the last iteration in which it was raised, and in how many."""

    name: str
    happens: str
    change: str
    first: int
    last: int
    iterations: int

    @property
    def when(self) -> str:
        """The iterations, in words."""
        if self.first == self.last:
            return f"iteration {self.first}"
        return f"iterations {self.first} to {self.last}, raised in {self.iterations}"


def raised(history: History, rules: Sequence[Rule] | None = None) -> dict[str, float]:
    """Return `alarm/<name>`, 1.0 or 0.0, after the last iteration of `history`, of the rules that apply to it."""
    return {rule.metric: float(rule.holds(history)) for rule in rules or RULES if rule.needs in history[-1]}


def alarms_of(records: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """Return the alarms that the records `{"iteration": 12, "metrics": {...}}` of a run hold, the earliest first."""
    found = []
    for rule in (*RULES, *STEP_RULES):
        if when := [int(record["iteration"]) for record in records if record["metrics"].get(rule.metric)]:
            found.append(Alarm(rule.name, rule.happens, rule.change, when[0], when[-1], len(when)))
    return sorted(found, key=lambda alarm: alarm.first)


def looked_at(history: History) -> list[Mapping[str, float]]:
    """Return what the rules will look at when a history goes on: its start, its end, and the newest held-out KLs."""
    if len(history) <= ENTROPY_WINDOW + LONGEST_WINDOW:
        return list(history)
    between = [item for item in history[ENTROPY_WINDOW:-LONGEST_WINDOW] if np.isfinite(item.get(HELDOUT_KL, np.nan))]
    return [*history[:ENTROPY_WINDOW], *between[-HELDOUT_KL_EVALUATIONS:], *history[-LONGEST_WINDOW:]]


# ---- rules ---------------------------------------------------------------------------------------------------------

OSCILLATION_WINDOW = 30  # iterations looked at
OSCILLATION_SMOOTHING = 5  # iterations of the moving average
OSCILLATION_SWING = 0.5  # a swing counts from this share of the rewards' standard deviation
OSCILLATION_TURNS = 4  # swings up and down


def reward_oscillates(history: History) -> bool:
    """Whether the smoothed mean reward turned round at least 4 times in 30 iterations, with large swings between."""
    rewards, spreads = (_last(history, name, OSCILLATION_WINDOW) for name in ("reward/mean", "reward/std"))
    if len(rewards) < OSCILLATION_WINDOW or not len(spreads):
        return False
    smooth = np.convolve(rewards, np.full(OSCILLATION_SMOOTHING, 1 / OSCILLATION_SMOOTHING), "valid")
    return turns(smooth, OSCILLATION_SWING * float(np.median(spreads))) >= OSCILLATION_TURNS


def turns(values: np.ndarray, swing: float) -> int:
    """Return how often the direction of `values` changes; it changes when they come back by more than `swing`."""
    count, direction = 0, 0
    low = high = float(values[0])
    for value in values.tolist():
        low, high = min(low, value), max(high, value)
        if direction <= 0 and value - low > swing:
            count, direction, high = count + (direction < 0), 1, value
        elif direction >= 0 and high - value > swing:
            count, direction, low = count + (direction > 0), -1, value
    return count


COLLAPSE_WINDOW = 30  # iterations, of which the first ten are compared with the last ten
COLLAPSE_PART = 10
COLLAPSE_FALL = 0.5  # share of the rewards' standard deviation
COLLAPSE_ERRORS = 4.0  # standard errors of the difference, by how much the reward varies between neighbours


def reward_collapses(history: History) -> bool:
    """Whether the mean reward fell within 30 iterations by half the rewards' standard deviation, and beyond noise."""
    rewards, spreads = (_last(history, name, COLLAPSE_WINDOW) for name in ("reward/mean", "reward/std"))
    if len(rewards) < COLLAPSE_WINDOW or not len(spreads):
        return False
    fall = float(rewards[:COLLAPSE_PART].mean() - rewards[-COLLAPSE_PART:].mean())
    noise = float(np.diff(rewards).std()) / np.sqrt(2)  # of one iteration
    return fall > max(COLLAPSE_FALL * float(np.median(spreads)), COLLAPSE_ERRORS * noise * np.sqrt(2 / COLLAPSE_PART))


KL_WINDOW = 3  # iterations in all of which it must be beyond: a mean could come from a single odd token
KL_LIMIT = {"actor/kl": 1.0, "actor/approx_kl": 0.1}  # nats per token: to the reference, of one iteration's updates
KL_GROWTH = 10.0  # times the median of the iterations before ...
KL_BEFORE = 20
KL_GROWN_FROM = 0.2  # ... and at least this share of the limit


HELDOUT_KL = "heldout/kl"
HELDOUT_KL_EVALUATIONS = 2  # a mean over all held-out responses, and rarely taken
HELDOUT_KL_LIMIT = 1.0  # nats per token, to the reference


def kl_explodes(history: History) -> bool:
    """Whether for 3 iterations a KL is beyond its limit, or beyond a fifth of it and ten times what it was.

    Or the held-out KL is beyond its limit in an evaluation and in the one before.
    """
    return any(_explodes(history, name, limit) for name, limit in KL_LIMIT.items()) or _explodes_heldout(history)


def _explodes_heldout(history: History) -> bool:
    values = _values(history, HELDOUT_KL)[-HELDOUT_KL_EVALUATIONS:]
    whole = HELDOUT_KL in history[-1] and len(values) == HELDOUT_KL_EVALUATIONS
    return whole and bool((values > HELDOUT_KL_LIMIT).all())


def _explodes(history: History, name: str, limit: float) -> bool:
    values = _last(history, name, KL_BEFORE + KL_WINDOW)
    if len(values) < KL_WINDOW:
        return False
    recent, before = float(values[-KL_WINDOW:].min()), values[:-KL_WINDOW]
    if recent > limit:
        return True
    return len(before) == KL_BEFORE and recent > max(KL_GROWN_FROM * limit, KL_GROWTH * float(np.median(before)))


ENTROPY_WINDOW = 5  # iterations whose mean counts, at the start and at the end
ENTROPY_LEFT = 0.1  # share of the start's entropy
ENTROPY_BELOW = 0.1  # nats per token: more is no collapse, however much there was


def entropy_collapses(history: History) -> bool:
    """Whether the entropy fell below a tenth of what it was in the first iterations, and below 0.1 nats per token."""
    start = _values(history[:ENTROPY_WINDOW], "actor/entropy")
    recent = _last(history, "actor/entropy", ENTROPY_WINDOW)
    if len(history) < 2 * ENTROPY_WINDOW or len(start) < ENTROPY_WINDOW or len(recent) < ENTROPY_WINDOW:
        return False
    return bool(recent.mean() < min(ENTROPY_BELOW, ENTROPY_LEFT * start.mean()))


TRUNCATION_WINDOW = 5
TRUNCATION_SHARE = 0.25


def responses_truncated(history: History) -> bool:
    """Whether at least a quarter of the responses were cut in each of the last 5 iterations."""
    return _all_reach(history, "rollout/truncated_share", TRUNCATION_WINDOW, TRUNCATION_SHARE)


GRADIENT_WINDOW = 30  # iterations whose median is the norm's usual size
GRADIENT_RECENT = 10
GRADIENT_TIMES = 5.0
GRADIENT_SPIKES = 2


def gradient_spikes(history: History, name: str = "actor/grad_norm") -> bool:
    """Whether in 2 of the last 10 iterations the gradient's norm was more than 5 times the median of the last 30."""
    norms = _last(history, name, GRADIENT_WINDOW)
    if len(norms) < 2 * GRADIENT_RECENT or not (usual := float(np.median(norms))):
        return False
    return int((norms[-GRADIENT_RECENT:] > GRADIENT_TIMES * usual).sum()) >= GRADIENT_SPIKES


MISMATCH_WINDOW = 3
MISMATCH_LIMIT = 0.01  # mean difference of probabilities; verl's documentation has the same bound for trouble


def policies_mismatch(history: History) -> bool:
    """Whether rollout's and trainer's probabilities were 0.01 apart, on the mean, in each of the last 3 iterations.

    Not where tokens are carried over: those of older policies have other probabilities.
    """
    if any(row.get(STALENESS, 0.0) > 0 for row in history[-MISMATCH_WINDOW:]):
        return False
    return _all_reach(history, "mismatch/probability_difference_mean", MISMATCH_WINDOW, MISMATCH_LIMIT)


WEIGHT_WINDOW = 3
WEIGHT_LIMIT = 0.5


def tokens_too_old(history: History) -> bool:
    """Whether tokens of older policies weighed less than half of a sample in each of the last 3 iterations."""
    values = _last(history, "mismatch/effective_sample_share", WEIGHT_WINDOW)
    return _all_reach(history, STALENESS, WEIGHT_WINDOW, 1.0) and bool((values < WEIGHT_LIMIT).all() and len(values))


WAITING_GAIN = 1.5  # times as fast, by what `tail_gain` expects


def rollout_waits(history: History) -> bool:
    """Whether `rollout.tail` would have made each of the last 5 iterations at least 1.5 times as fast."""
    found = gains(history, tail_gain)
    return bool(found) and min(found) >= WAITING_GAIN


SILENCE_WINDOW = 5
SILENCE_SHARE = 0.95

LONGEST_WINDOW = max(OSCILLATION_WINDOW, KL_BEFORE + KL_WINDOW, GRADIENT_WINDOW)


def nothing_to_learn(history: History) -> bool:
    """Whether at least 95 % of the responses had no advantage in each of the last 5 iterations."""
    return _all_reach(history, "advantage/zero_share", SILENCE_WINDOW, SILENCE_SHARE)


def steps_skipped(history: History) -> bool:
    """Whether the last iteration's updates skipped an optimizer step: its gradient was not finite."""
    return any(history[-1].get(f"{role}/skipped_steps", 0.0) > 0 for role in ("actor", "critic"))


LOSS_WINDOW = 20  # steps whose mean counts, against that of the first 5
LOSS_RISE = 0.05  # share of the start's loss
LOSS_ERRORS = 4.0  # standard errors of the difference, by how much the loss varies between neighbours


def loss_rises(history: History) -> bool:
    """Whether the mean loss of the last 20 steps is above that of the first 5, by a twentieth and beyond noise."""
    start, recent = _values(history[:ENTROPY_WINDOW], "loss"), _last(history, "loss", LOSS_WINDOW)
    if len(history) < ENTROPY_WINDOW + LOSS_WINDOW or not len(start) or len(recent) < LOSS_WINDOW:
        return False
    noise = float(np.diff(recent).std()) / np.sqrt(2) * np.sqrt(1 / len(start) + 1 / LOSS_WINDOW)
    return float(recent.mean() - start.mean()) > max(LOSS_RISE * abs(float(start.mean())), LOSS_ERRORS * noise)


def heldout_loss_rose(history: History) -> bool:
    """Whether the held-out loss is higher than when it was first measured."""
    losses = _values(history, "heldout/loss")
    return len(losses) > 1 and bool(losses[-1] > losses[0])


def _all_reach(history: History, name: str, window: int, limit: float) -> bool:
    values = _last(history, name, window)
    return len(values) == window and bool((values >= limit).all())


def _last(history: History, name: str, window: int) -> np.ndarray:
    return _values(history[-window:], name)


def _values(history: History, name: str) -> np.ndarray:
    values = np.asarray([item[name] for item in history if name in item], np.float64)
    return values[np.isfinite(values)]


RULES = (
    Rule(
        "reward_oscillation",
        "reward/mean",
        reward_oscillates,
        "The mean reward swings up and down instead of rising",
        "Each update takes the policy too far: lower actor.optimizer.learning_rate, or take more prompts per iteration "
        "(rollout.prompts), or fewer steps on the same experience (algorithm.epochs, algorithm.mini_batches)",
    ),
    Rule(
        "reward_collapse",
        "reward/mean",
        reward_collapses,
        "The mean reward falls, by more than half of what rewards differ among each other",
        "Look at samples of these iterations and at reward/failures; lower actor.optimizer.learning_rate, and go back "
        "to a checkpoint from before (--resume RUN --from ITERATION); faults.reward acts on a fall by itself",
    ),
    Rule(
        "kl_explosion",
        "actor/approx_kl",
        kl_explodes,
        "The policy runs away: its KL to the reference, or to itself before an update, is far beyond the usual",
        "Lower actor.optimizer.learning_rate, raise algorithm.kl.coefficient (or add algorithm.kl), and go back to a "
        "checkpoint from before (--resume RUN --from ITERATION); read samples, since a reward can be earned without "
        "doing the task. faults.kl and faults.update_kl act on a limit by themselves",
    ),
    Rule(
        "entropy_collapse",
        "actor/entropy",
        entropy_collapses,
        "The policy has become nearly deterministic: the entropy is below a tenth of what it was at the start, and "
        "samples of a prompt are alike",
        "Raise algorithm.settings.clip_high or algorithm.entropy_coefficient, keep rollout.temperature at 1, or lower "
        "actor.optimizer.learning_rate; if the reward is as high as it can be, the training is simply done",
    ),
    Rule(
        "truncation",
        "rollout/truncated_share",
        responses_truncated,
        "At least a quarter of the responses are cut before they end, and are scored without their end",
        "Raise rollout.max_response_tokens, or punish length with reward.overlong; if all are cut, the model does not "
        "end its responses: check its chat template and data.chat",
    ),
    Rule(
        "gradient_spikes",
        "actor/grad_norm",
        gradient_spikes,
        "The actor's gradient is again and again more than five times its usual size",
        "Lower actor.optimizer.learning_rate or actor.optimizer.max_grad_norm, lengthen "
        "actor.optimizer.warmup_steps, and look for extreme rewards in the experience of these iterations",
    ),
    Rule(
        "rollout_mismatch",
        "mismatch/probability_difference_mean",
        policies_mismatch,
        "The rollout engine's policy is not the trainer's: their probabilities of a token differ by 0.01 on the mean",
        "Correct it by algorithm.correction (weights: token, or reject), set model.dtype to float32 to see whether "
        "rounding is the cause, and with several steps on one experience take fewer",
    ),
    Rule(
        "tokens_too_old",
        STALENESS,
        tokens_too_old,
        "Responses of older policies are so far from the present policy that their weights leave less than half "
        "of the sample",
        "Lower staleness or extra of rollout.carry or rollout.stream, or actor.optimizer.learning_rate",
    ),
    Rule(
        "nothing_to_learn",
        "advantage/zero_share",
        nothing_to_learn,
        "Nearly all responses have no advantage: those of a prompt all earn the same, and nothing is learnt from them",
        "The prompts are too hard or too easy, or the reward tells nothing apart: choose others, raise rollout.samples "
        "or rollout.temperature, give partial rewards, or draw others by algorithm.dynamic_sampling",
    ),
    Rule(
        "rollout_waits",
        WAITED,
        rollout_waits,
        "Iterations wait for the prompts whose responses take longest: if they did not, they would be at least 1.5 "
        "times as fast",
        "Put them off by rollout.tail, or go on with them by rollout.carry (docs/asynchrony.md says what that does to "
        "a training), or bound them: lower "
        "rollout.max_response_tokens, or environment.max_turns and environment.timeout_s",
    ),
    Rule(
        "skipped_steps",
        "actor/skipped_steps",
        steps_skipped,
        "An optimizer step of actor or critic was skipped, since its gradient was NaN or infinite: nothing was learnt "
        "from its responses",
        "Look for extreme rewards in the experience of this iteration, lower actor.optimizer.learning_rate or "
        "algorithm.settings.clip_high, or train with model.dtype=float32; several in a row end the training",
    ),
)

STEP_RULES = (
    Rule(
        "loss_rises",
        "loss",
        loss_rises,
        "The loss is higher than it was in the first steps",
        "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, and look for rows of another kind late in "
        "the data where they are taken in their order",
    ),
    Rule(
        "gradient_jumps",
        "grad_norm",
        partial(gradient_spikes, name="grad_norm"),
        "The gradient is again and again more than five times its usual size",
        "Lower optimizer.learning_rate or optimizer.max_grad_norm, lengthen optimizer.warmup_steps, and look for odd "
        "rows in the data",
    ),
    Rule(
        "steps_skipped",
        "skipped_steps",
        lambda history: history[-1].get("skipped_steps", 0.0) > 0,
        "An optimizer step was skipped, since its gradient was NaN or infinite: nothing was learnt from its rows",
        "Look for odd rows in the data, lower optimizer.learning_rate, or train with model.dtype=float32; several in a "
        "row end the training",
    ),
    Rule(
        "overfitting",
        "heldout/loss",
        heldout_loss_rose,
        "The held-out loss is higher than before the training",
        "Take fewer steps, lower optimizer.learning_rate, or give more data: the model learns the rows by heart. An "
        "accuracy that has risen all the same says that it is more sure of itself than it is right",
    ),
)
