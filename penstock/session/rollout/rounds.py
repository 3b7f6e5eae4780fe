"""Rounds: which prompts a rollout begins, and which of them wait after it (`rollout.tail`, `carry`, `stream`).

Tail: a short round begins more prompts than an iteration takes. The first to have all their responses make the batch,
and the others wait, so nobody waits for the longest. As many are under way as make a batch; the others begin as there
is room, which comes soon where lengths differ, and where they do not nothing is sampled in vain. A long round begins
those that have waited, the longest first, and takes all of them; it is due once they fill a batch, or one of them has
waited for as long as it may. So every prompt has its turn, and all tokens that are trained on are the present policy's
(tail batching of RollPacker, Gao et al. 2025, arXiv 2509.21009, without its choice among the responses of a prompt).
Where a prompt may be put off several times, there are rounds between: they begin those that were put off as often as
each other, as many as a short round begins, and put the last of them off once more.

What was sampled for prompts that then wait is lost: at staleness 0 the next policy has no use for it. Within the
iteration it has: where refused groups are to be replaced, a further round goes on with it.

Carry: every round goes on with what the one before has left, and has as many new prompts as that has taken. As many
are under way as make a batch; with an environment, whose answers take time, and with `max_wait`, all. The first to have
all their responses make the batch; so do, in any case, those that were begun as many updates ago as staleness may be.
Nothing is lost, and tokens are of several policies (partial rollouts of Kimi k1.5, Kimi team 2025, arXiv 2501.12599;
with whole groups only). With `max_wait` nobody waits for these: they are put off as with a tail, and begun anew with
others that were. So the longest responses share a few rounds, which alone wait for them, and the more are under
way, the fewer decoding steps a round has. A rollout that begins before the update on the one before
(`rollout.stream.staleness`) is such a round, whose first tokens are one update older.

Left out: the engines' part (penstock/engines/rollout/quota.py), what is kept of responses (carried.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.configs.sections.rollout import RolloutConfig, TailConfig
from penstock.session.requests import Round
from penstock.session.rollout.draw import draw
from penstock.session.session import Training
from penstock.state.deferred import Deferred
from penstock.state.experience import ExperienceRef
from penstock.state.manifest import Progress


def next_round(training: Training, iteration: int, progress: Progress) -> Round:
    """Return the first round of the iteration after `progress`.

    Raises:
        UserError: as `penstock.session.rollout.draw.draw`.
    """
    config, waiting = training.config.rollout, progress.deferred
    if config.goes_on:
        return _round_that_goes_on(training, iteration, progress)
    if config.tail is None:
        return Round(tuple(_new(training, iteration, progress.prompt_cursor, config.prompts)), config.prompts, None)
    if places := _taken(config.prompts, config.tail, iteration, waiting):
        old, resting = _parted(waiting, places)
        more = config.prompts - len(old)
        new = _new(training, iteration, progress.prompt_cursor, more)
        return Round((*old, *new), more, None, resting)
    if places := _put_off_alike(config.prompts_begun, config.tail.deferrals, waiting):
        old, resting = _parted(waiting, places)
        again = tuple(replace(prompt, begun=prompt.begun + 1) for prompt in old)
        return Round(again, 0, config.prompts, resting, together=config.prompts)
    more, goes_on = config.prompts_begun, training.config.algorithm.dynamic_sampling is not None
    new = _new(training, iteration, progress.prompt_cursor, more)
    return Round(tuple(new), more, config.prompts, waiting, goes_on=goes_on, together=config.prompts)


def further_round(
    training: Training, iteration: int, cursor: int, missing: int, more: int, waiting: tuple[Deferred, ...]
) -> Round:
    """Return a further round of an iteration, which is to replace groups.

    It goes on with what is under way, begins as many prompts as groups are missing, and ends when as many are complete:
    what is under way anyway is as good as what is begun for it. As many wait afterwards as before, and none is complete
    in vain. Under way is, where responses are carried over, all that waits; with a tail, what this policy's short round
    has left.
    Where nothing is, as many prompts are begun as should be enough, and all of them are waited for.

    Args:
        cursor: prompts drawn before.
        missing: groups to replace.
        more: prompts that should be enough to replace them, if some are refused again and none is kept for later.
        waiting: what the iteration's rounds before have left.

    Raises:
        UserError: as `penstock.session.rollout.draw.draw`.
    """
    if training.config.rollout.goes_on:
        begun, resting = _going_on(waiting)
    else:
        begun = tuple(prompt for prompt in waiting if prompt.since == iteration)
        resting = tuple(prompt for prompt in waiting if prompt.since < iteration)
        if not begun:
            return Round(tuple(_new(training, iteration, cursor, more)), more, None, resting)
    return Round((*begun, *_new(training, iteration, cursor, missing)), missing, missing, resting, goes_on=True)


def _round_that_goes_on(training: Training, iteration: int, progress: Progress) -> Round:
    config, environment = training.config.rollout, training.config.environment
    old, resting = _going_on(progress.deferred)
    at_last = [prompt for prompt in old if iteration - prompt.begun_in >= config.rounds_under_way]
    required = len(at_last) if config.max_wait is None else sum(prompt.again > 0 for prompt in at_last)
    turn, resting = _begun_anew(config, iteration, resting)
    more = config.prompts_begun - len(old) - len(turn)
    begun = (*old, *turn, *_new(training, iteration, progress.prompt_cursor, more))
    return Round(
        begun,
        more,
        config.prompts if len(begun) > config.prompts else None,
        resting,
        again=len(turn),
        required=required,
        last_chance=len(at_last) - required,
        goes_on=True,
        together=None if environment or config.max_wait is not None else config.prompts,
    )


def _going_on(waiting: Sequence[Deferred]) -> tuple[tuple[Deferred, ...], tuple[Deferred, ...]]:
    """Return the prompts that are under way, and those that rest.

    Those begun first come first, and of these those that may rest no more: this is the order in which they are left.
    """
    old = sorted((one for one in waiting if not one.rests), key=lambda one: (one.begun_in, not one.again))
    return tuple(old), tuple(one for one in waiting if one.rests)


def _begun_anew(
    config: RolloutConfig, iteration: int, resting: tuple[Deferred, ...]
) -> tuple[tuple[Deferred, ...], tuple[Deferred, ...]]:
    """Return the prompts that rest and have their turn, as they are begun anew, and those that rest on."""
    waited = config.max_wait is not None and any(iteration - one.since >= config.max_wait for one in resting)
    if not waited and len(resting) < config.prompts:
        return (), resting
    turn = resting[: config.prompts]
    return tuple(replace(one, again=iteration, rests=False, begun=one.begun + 1) for one in turn), resting[len(turn) :]


def _new(training: Training, iteration: int, cursor: int, count: int) -> list[Deferred]:
    rows = draw(training, iteration, cursor, count) if count else np.empty(0, np.int64)
    return [Deferred(int(row), iteration) for row in rows]


def _taken(prompts: int, tail: TailConfig, iteration: int, waiting: Sequence[Deferred]) -> list[int]:
    """Return the places of those who wait and have their turn in a long round; none if it is not due.

    They may be put off no more, and fill a batch; or one has waited for long enough, and the oldest come with it.
    """
    if any(iteration - prompt.since >= tail.max_wait for prompt in waiting):
        return list(range(len(waiting)))[:prompts]
    last = [place for place, prompt in enumerate(waiting) if prompt.begun >= tail.deferrals]
    return last[:prompts] if len(last) >= prompts else []


def _put_off_alike(begun: int, deferrals: int, waiting: Sequence[Deferred]) -> list[int]:
    """Return the places of those who wait and may be put off once more, if enough of them were put off as often."""
    for times in range(deferrals - 1, 0, -1):
        alike = [place for place, prompt in enumerate(waiting) if prompt.begun == times]
        if len(alike) >= begun:
            return alike[:begun]
    return []


def _parted(waiting: Sequence[Deferred], places: Sequence[int]) -> tuple[list[Deferred], tuple[Deferred, ...]]:
    """Return the prompts at these places, and the others."""
    taken = set(places)
    others = tuple(prompt for place, prompt in enumerate(waiting) if place not in taken)
    return [waiting[place] for place in places], others


def round_figures(
    config: RolloutConfig, iteration: int, this_round: Round, experience: ExperienceRef, unused_tokens: int
) -> dict[str, float]:
    """Return what a round has put off; nothing where rounds put nothing off.

    Args:
        experience: that was made of it.
        unused_tokens: sampled for prompts that wait.
    """
    if config.tail is None and not config.goes_on:
        return {}
    figures, begun = dict[str, float](), len(this_round.begun)
    if config.tail is not None:
        figures["rollout/long_round"] = float(this_round.wanted is None)
    if config.max_wait is not None:
        resting = sum(prompt.rests for prompt in experience.deferred)
        figures["rollout/put_off"] = float(resting - len(this_round.resting))
    return figures | {
        "rollout/prompts_drawn": float(this_round.drawn),
        "rollout/deferred_share": 1 - (this_round.wanted or begun) / begun,
        **waiting_figures(iteration, experience, unused_tokens),
    }


def waiting_figures(iteration: int, experience: ExperienceRef, unused_tokens: int) -> dict[str, float]:
    """Return how many prompts wait after rounds of an iteration, since when, and what was sampled in vain."""
    waiting = experience.deferred
    return {
        "rollout/deferred": float(len(waiting)),
        "rollout/deferred_age_max": float(max((iteration - prompt.since for prompt in waiting), default=0)),
        "rollout/unused_share": unused_tokens / (unused_tokens + experience.response_tokens),
    }
