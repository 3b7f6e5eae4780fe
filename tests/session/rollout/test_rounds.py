"""Whatever rounds leave, every prompt that was drawn is taken once, and none waits longer than it may."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import TypeAdapter

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session.requests import Round
from penstock.session.rollout.draw import draw
from penstock.session.rollout.rounds import next_round, round_figures
from penstock.session.session import Training
from penstock.state.deferred import Deferred
from penstock.state.experience import ExperienceRef
from penstock.state.manifest import Progress

PROMPTS = 6


@pytest.fixture
def training_of(training_with: Callable[[TrainConfig], Training]) -> Callable[..., Training]:
    """Make a training with a table of 50 prompts."""

    def make(**rollout: object) -> Training:
        apart = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}
        groups = {"groups": apart} if "stream" in rollout else {}
        config = config_from_mapping({"rollout": {"prompts": PROMPTS, **rollout}, **groups}, "test")
        training = training_with(config)
        names = [f"p{number}" for number in range(50)]
        training.session().prompts["train"] = SimpleNamespace(frame=pd.DataFrame({"prompt_id": names}))  # type: ignore[assignment]
        return training

    return make


def later(progress: Progress, this_round: Round, answered: list[int]) -> Progress:
    """Return the progress after an iteration, read back as a resume reads it from the manifest."""
    after = progress.advanced(
        iteration=progress.iteration + 1,
        prompt_cursor=progress.prompt_cursor + this_round.drawn,
        deferred=this_round.waiting(answered),
    )
    return TypeAdapter(Progress).validate_python(json.loads(json.dumps(dataclasses.asdict(after))))


@pytest.mark.parametrize(
    ("extra", "max_wait", "deferrals"),
    [(0.25, 8, 1), (0.5, 2, 1), (1.0, 1, 1), (2.5, 3, 1), (0.5, 30, 2), (0.5, 4, 2), (1.0, 40, 3)],
)
def test_every_prompt_is_taken_once_and_in_time(
    training_of: Callable[..., Training], extra: float, max_wait: int, deferrals: int
) -> None:
    """Over 60 iterations in which the same prompts tend to be the last ones. Every batch is full.

    None is begun more often than it may be put off and once more. Control: those that may be put off again are.
    """
    tail = {"extra": extra, "max_wait": max_wait, "deferrals": deferrals}
    training, chance = training_of(tail=tail), random.Random(1)
    progress, taken, long, begun = Progress(), Counter[int](), 0, 0
    for iteration in range(1, 61):
        this_round = next_round(training, iteration, progress)
        positions = range(len(this_round.begun))
        slow = sorted(positions, key=lambda at: (this_round.begun[at].row % 7 == 0, chance.random()))
        answered = slow if this_round.wanted is None else slow[: this_round.wanted]
        assert len(answered) == PROMPTS
        assert this_round.together == this_round.wanted, "as many are under way as make a batch"
        for position in answered:
            prompt = this_round.begun[position]
            assert iteration - prompt.since <= max_wait
            taken[prompt.row] += 1
        long += this_round.wanted is None
        begun = max(begun, *(prompt.begun for prompt in this_round.begun))
        progress = later(progress, this_round, sorted(answered))
        assert len(progress.deferred) < deferrals * (2 + extra) * PROMPTS
        assert [one.since for one in progress.deferred] == sorted(one.since for one in progress.deferred)
    waiting = Counter(prompt.row for prompt in progress.deferred)
    drawn = Counter(draw(training, 1, 0, progress.prompt_cursor).tolist())
    assert taken + waiting == drawn
    assert (3 if max_wait < 30 else 0) < long < 57
    assert begun == (deferrals if max_wait > deferrals else 1)


@pytest.mark.parametrize(
    ("mode", "extra", "staleness", "rounds"),
    [("carry", 0.25, 2, 2), ("carry", 0.5, 1, 1), ("carry", 1.0, 3, 3), ("stream", 0.25, 2, 1), ("stream", 1.0, 4, 3)],
)
def test_what_is_carried_is_taken_once_and_no_older_than_it_may_be(
    training_of: Callable[..., Training], mode: str, extra: float, staleness: int, rounds: int
) -> None:
    """Over 60 iterations in which the same prompts tend to be the last. Rounds are equally large, every batch is full.

    One that begins ahead is an update older from its first token on. Control: without the requirement a prompt would be
    older.
    """
    oldest = {}
    for obeys in (True, False):
        training, chance = training_of(**{mode: {"extra": extra, "staleness": staleness}}), random.Random(1)
        progress, taken, ages = Progress(), Counter[int](), [0]
        for iteration in range(1, 61):
            this_round = next_round(training, iteration, progress)
            required = this_round.required if obeys else 0
            assert this_round.together == PROMPTS
            slow = sorted(
                range(len(this_round.begun)),
                key=lambda at: (at >= required, this_round.begun[at].row % 7 == 0, chance.random()),
            )
            assert len(this_round.begun) == training.config.rollout.prompts_begun
            assert this_round.drawn == (PROMPTS if iteration > 1 else len(this_round.begun))
            answered = sorted(slow[: this_round.wanted])
            assert len(answered) == PROMPTS
            taken.update(this_round.begun[at].row for at in answered)
            ages += [iteration - this_round.begun[at].since for at in answered]
            progress = later(progress, this_round, answered)
        waiting = Counter(prompt.row for prompt in progress.deferred)
        drawn = Counter(draw(training, 1, 0, progress.prompt_cursor).tolist())
        assert taken + waiting == drawn
        oldest[obeys] = max([*ages, *(60 - prompt.since for prompt in progress.deferred)])
    assert oldest[True] == rounds < oldest[False]


@pytest.mark.parametrize(("extra", "staleness", "max_wait"), [(0.5, 2, 9), (1.0, 1, 4), (0.25, 1, 12)])
def test_what_is_too_long_to_go_on_is_begun_anew_together(
    training_of: Callable[..., Training], extra: float, staleness: int, max_wait: int
) -> None:
    """Over 80 iterations in which the same prompts tend to be the last. Every batch is full, every prompt taken once.

    None is waited for before it was put off, and then always: it is put off once, is under way for `staleness` rounds
    at a time, and its turn comes after `max_wait` iterations. So rounds that wait are few. Control: without `max_wait`
    there are more of them.
    """
    waits = {}
    for limit in (max_wait, None):
        carry = {"extra": extra, "staleness": staleness, "max_wait": limit}
        training, chance = training_of(carry=carry), random.Random(1)
        progress, taken, waits[limit] = Progress(), Counter[int](), 0
        for iteration in range(1, 81):
            this_round = next_round(training, iteration, progress)
            assert this_round.together == (PROMPTS if limit is None else None)
            before = this_round.begun_before
            assert before == tuple(sorted(before, key=lambda one: one.begun_in)), "as they were left"
            assert len(this_round.begun) == training.config.rollout.prompts_begun
            required, last = this_round.required, this_round.last_chance
            waits[limit] += required > 0
            slow = sorted(
                range(len(this_round.begun)),
                key=lambda at: (at >= required, this_round.begun[at].row % 5 == 0, chance.random()),
            )
            answered = sorted(slow[: this_round.wanted])
            assert len(answered) == PROMPTS
            for at in answered:
                prompt = this_round.begun[at]
                assert iteration - prompt.begun_in <= staleness
                assert iteration - prompt.since <= max_wait + staleness
            assert all(one.again for one in this_round.begun[:required]) or limit is None
            left = this_round.left(answered)
            late = [this_round.begun[at].row for at in range(required, required + last) if at not in answered]
            assert [one.row for one in left if one.rests] == late
            assert max(one.begun for one in this_round.begun) <= 2
            taken.update(this_round.begun[at].row for at in answered)
            progress = later(progress, this_round, answered)
            going_on = tuple(one for one in left if not one.rests)
            assert next_round(training, iteration + 1, progress).begun_before == going_on, "in the order of their file"
        waiting = Counter(prompt.row for prompt in progress.deferred)
        drawn = Counter(draw(training, 1, 0, progress.prompt_cursor).tolist())
        assert taken + waiting == drawn
    assert 0 < waits[max_wait] < waits[None]


def test_a_rollout_ahead_at_staleness_1_leaves_nothing(training_of: Callable[..., Training]) -> None:
    """Its tokens are an update old when their batch is complete: all of its prompts are waited for."""
    training = training_of(stream={"staleness": 1})
    this_round = next_round(training, 3, Progress(iteration=2, prompt_cursor=12))
    assert this_round.rows_P.tolist() == draw(training, 3, 12, PROMPTS).tolist()
    assert (this_round.wanted, this_round.drawn, this_round.goes_on) == (None, PROMPTS, True)


def test_without_a_tail_a_round_is_the_iteration_s_prompts(training_of: Callable[..., Training]) -> None:
    """And says nothing of itself."""
    training = training_of()
    this_round = next_round(training, 3, Progress(iteration=2, prompt_cursor=12))
    assert this_round.rows_P.tolist() == draw(training, 3, 12, PROMPTS).tolist()
    assert (this_round.wanted, this_round.drawn, this_round.waiting(range(PROMPTS))) == (None, PROMPTS, ())
    assert round_figures(training.config.rollout, 3, this_round, ExperienceRef("", 12, 6, 30, 2), 0) == {}


def test_what_was_put_off_is_among_the_figures(training_of: Callable[..., Training]) -> None:
    """How many, how old, and which share of what was begun."""
    training = training_of(tail={"extra": 0.5})
    this_round = next_round(training, 5, Progress(iteration=4, deferred=(Deferred(7, 2),)))
    waiting = this_round.waiting([0, 1, 2, 3, 5, 8])
    assert [prompt.since for prompt in waiting] == [2, 5, 5, 5]
    experience = ExperienceRef("", 12, 6, 30, 4, deferred=waiting)
    assert round_figures(training.config.rollout, 5, this_round, experience, unused_tokens=10) == {
        "rollout/prompts_drawn": 9.0,
        "rollout/deferred": 4.0,
        "rollout/deferred_share": pytest.approx(1 / 3),
        "rollout/deferred_age_max": 3.0,
        "rollout/long_round": 0.0,
        "rollout/unused_share": 0.25,
    }
    assert np.array_equal(this_round.rows_P, draw(training, 5, 0, 9))


@pytest.mark.parametrize("carry", [{"extra": 0}, {"extra": 1.5}, {"staleness": 0}, {"share": 0.5}])
def test_what_carries_nothing_or_more_than_a_batch_is_refused(carry: dict[str, float]) -> None:
    """Before anything starts."""
    with pytest.raises(UserError, match=r"rollout\.carry"):
        config_from_mapping({"rollout": {"carry": carry}}, "test")


def test_what_is_carried_over_is_corrected_unless_the_recipe_says_otherwise() -> None:
    """By weights of single tokens. Controls: without carrying there is none; an empty section only measures."""
    carried: dict[str, Any] = {"rollout": {"carry": {}}}
    correction = config_from_mapping(carried, "test").algorithm.correction
    assert correction is not None and (correction.weights, correction.cap) == ("token", 2.0)
    resolved = config_from_mapping(carried, "test")
    assert config_from_mapping(resolved.model_dump(mode="json", exclude={"base"}), "test") == resolved
    assert config_from_mapping({}, "test").algorithm.correction is None
    measured = config_from_mapping({**carried, "algorithm": {"correction": {}}}, "test").algorithm.correction
    assert measured is not None and measured.weights is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"carry": {}, "tail": {}}}, "'tail' and 'carry' exclude each other"),
        ({"rollout": {"carry": {}, "top_p": 0.9}}, "'algorithm.correction' compares whole distributions"),
    ],
)
def test_what_does_not_go_with_carrying_is_refused(sections: dict[str, Any], said: str) -> None:
    """Before anything starts."""
    with pytest.raises(UserError, match=said):
        config_from_mapping(sections, "test")


@pytest.mark.parametrize("tail", [{"extra": 0}, {"extra": 5}, {"max_wait": 0}, {"deferrals": 0}, {"share": 0.5}])
def test_what_puts_off_nothing_or_for_ever_is_refused(tail: dict[str, float]) -> None:
    """Before anything starts."""
    with pytest.raises(UserError, match=r"rollout\.tail"):
        config_from_mapping({"rollout": {"tail": tail}}, "test")


def test_prompts_that_are_put_off_before_they_went_on_are_refused() -> None:
    """One is put off after `staleness` iterations, and waits from its first one on. Control: an iteration more."""
    with pytest.raises(UserError, match=r"'max_wait' \(2\) has to exceed 'staleness' \(2\)"):
        config_from_mapping({"rollout": {"carry": {"max_wait": 2}}}, "test")
    assert config_from_mapping({"rollout": {"carry": {"max_wait": 3}}}, "test").rollout.max_wait == 3


def test_deferrals_that_no_prompt_comes_to_are_refused() -> None:
    """The first that is put off again is so after as many rounds as leave enough. Controls: an iteration more each.

    Eight prompts and a tenth are nine, so a round leaves one of them, and nine rounds enough.
    """
    for prompts, extra, deferrals, rounds in ((10, 0.1, 2, 11), (8, 0.1, 2, 9), (6, 1.0, 3, 2 + 4), (6, 0.5, 3, 3 + 9)):
        tail = {"extra": extra, "deferrals": deferrals, "max_wait": rounds}
        with pytest.raises(UserError, match=f"put off {deferrals} times within tail.max_wait={rounds} iterations"):
            config_from_mapping({"rollout": {"prompts": prompts, "tail": tail}}, "test")
        enough = {"rollout": {"prompts": prompts, "tail": {**tail, "max_wait": rounds + 1}}}
        assert config_from_mapping(enough, "test").rollout.tail is not None


def test_deferrals_by_which_prompts_would_wait_too_long_are_refused() -> None:
    """Where a round puts off more than a long one takes. Control: as many."""
    tail = {"extra": 1.5, "deferrals": 2, "max_wait": 9}
    with pytest.raises(UserError, match="some would outlast tail.max_wait"):
        config_from_mapping({"rollout": {"tail": tail}}, "test")
    assert config_from_mapping({"rollout": {"tail": {**tail, "extra": 1.0}}}, "test").rollout.tail is not None
