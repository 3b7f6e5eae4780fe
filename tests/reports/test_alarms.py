"""Alarms: each is raised by what it is named after and by no other trouble, and a training that learns raises none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.loading.keys import describe_keys
from penstock.reports.alarms import RULES, STEP_RULES, History, alarms_of, looked_at, raised, turns
from penstock.reports.waiting import ahead_gain, carry_gain, tail_gain

Row = dict[str, float]
ITERATIONS = 60


def healthy(iterations: int = ITERATIONS, seed: int = 0) -> list[Row]:
    """A training with the shapes and the noise of the quickstart: the reward rises from a half, the entropy falls to a
    quarter, a KL builds up, norms vary by a fifth, and groups of equal rewards become many."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(iterations):
        done = number / iterations
        reward = 0.52 + 0.36 * done + draw.normal(0, 0.025)
        rows.append(
            {
                "reward/mean": reward,
                "reward/std": float(np.sqrt(max(reward * (1 - reward), 0.0))),
                "actor/entropy": 0.46 * 0.25**done * draw.uniform(0.95, 1.05),
                "actor/kl": 0.15 * done * draw.uniform(0.8, 1.2),
                "actor/approx_kl": 2e-4 * draw.uniform(0, 3) if number else 0.0,
                "actor/grad_norm": 0.7 * draw.uniform(0.7, 1.8),
                "rollout/truncated_share": 0.002 * draw.uniform(),
                "mismatch/probability_difference_mean": 0.003 * draw.uniform(0.8, 1.2),
                "advantage/zero_share": 0.03 + 0.5 * done,
                "actor/skipped_steps": 0.0,
                "time/iteration_s": 10.0,
                "rollout/prompt_s_max": 3.0 * draw.uniform(0.8, 1.2),
                "rollout/prompt_s_p80": 1.5,
                "rollout/staleness_max": 0.0,
                "mismatch/effective_sample_share": draw.uniform(0.8, 1.0),
            }
        )
    return rows


def raised_in(history: list[Row]) -> dict[str, list[int]]:
    """Return in which iterations (from 1) each alarm was raised, judged as a training would, one after the other."""
    found: dict[str, list[int]] = {}
    for end in range(1, len(history) + 1):
        for name, value in raised(history[:end]).items():
            if value:
                found.setdefault(name.removeprefix("alarm/"), []).append(end)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_training_that_learns_raises_no_alarm(seed: int) -> None:
    """Negative control for all rules, in every iteration; each of them applies."""
    history = healthy(seed=seed)
    assert raised_in(history) == {}
    assert len(raised(history)) == len(RULES)


def test_the_noise_of_small_batches_is_no_oscillation() -> None:
    """Eight prompts per iteration: the mean reward has a standard error of 0.17."""
    draw = np.random.default_rng(2)
    history = [row | {"reward/mean": row["reward/mean"] + draw.normal(0, 0.17)} for row in healthy(200)]
    assert not {"reward_oscillation", "reward_collapse"} & set(raised_in(history))


def test_two_single_outliers_are_no_alarm() -> None:
    """One odd iteration of each figure, early and late."""
    history = healthy()
    odd = {
        "reward/mean": 0.0,
        "actor/entropy": 0.0,
        "actor/kl": 1.2,
        "actor/grad_norm": 50.0,
        "rollout/truncated_share": 1.0,
        "mismatch/probability_difference_mean": 0.3,
        "advantage/zero_share": 1.0,
    }
    for number in (20, 45):
        history[number] = history[number] | odd
    assert raised_in(history) == {}


def swings(number: int) -> Row:
    return {"reward/mean": 0.5 + 0.35 * np.sin(number / 10 * 2 * np.pi), "reward/std": 0.45}


TROUBLES: dict[str, Callable[[int], Row]] = {
    "reward_oscillation": swings,
    "reward_collapse": lambda number: {"reward/mean": 0.8 - 0.013 * number},
    "kl_explosion": lambda number: {"actor/kl": 0.02 * 1.3 ** max(0, number - 30)},
    "entropy_collapse": lambda number: {"actor/entropy": 0.46 * 0.8**number},
    "truncation": lambda number: {"rollout/truncated_share": 0.01 * number},
    "gradient_spikes": lambda number: {"actor/grad_norm": 9.0 if number > 30 and number % 5 == 0 else 0.7},
    "rollout_mismatch": lambda number: {"mismatch/probability_difference_mean": 0.0005 * number},
    "tokens_too_old": lambda number: {
        "rollout/staleness_max": 2.0,
        "mismatch/effective_sample_share": 1 - 0.015 * number,
    },
    "nothing_to_learn": lambda number: {"advantage/zero_share": min(1.0, 0.03 * number)},
    "rollout_waits": lambda number: {"rollout/prompt_s_max": min(8.0, 0.3 * number)},
    "skipped_steps": lambda number: {"actor/skipped_steps": float(number > 30)},
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_raises_its_own_alarm_and_no_other(name: str) -> None:
    """Not from the start, but while it lasts, also at the end."""
    history = [row | TROUBLES[name](number) for number, row in enumerate(healthy())]
    found = raised_in(history)
    assert list(found) == [name]
    assert found[name][0] > 5
    assert found[name][-1] == ITERATIONS


def test_a_held_out_kl_is_believed_when_an_evaluation_confirms_it() -> None:
    """It is rarely taken: beyond its limit twice, and said in an iteration that has one. Control: once is no alarm."""
    history = healthy()
    for number in (19, 39, 59):
        history[number] = history[number] | {"heldout/kl": 1.5 if number > 19 else 0.1}
    assert raised_in(history) == {"kl_explosion": [60]}
    history[59] = history[59] | {"heldout/kl": 0.9}
    assert raised_in(history) == {}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_single_skipped_step_is_said_in_its_iteration(role: str) -> None:
    """Its loss and norm are no numbers, and are not recorded. Control: the iterations around it."""
    history = healthy()
    history[30] = {name: value for name, value in history[30].items() if name != "actor/grad_norm"}
    history[30][f"{role}/skipped_steps"] = 1.0
    assert raised_in(history) == {"skipped_steps": [31]}


def test_every_rule_has_a_trouble_that_raises_it() -> None:
    """No rule is without a positive and a negative control."""
    assert set(TROUBLES) == {rule.name for rule in RULES}


def test_an_update_that_runs_away_raises_the_kl_alarm_without_a_reference() -> None:
    """Most recipes have no reference: the KL of the update is there in all."""
    history = [{"actor/approx_kl": 2e-4 if number < 30 else 0.05} for number in range(33)]
    assert raised_in(history) == {"kl_explosion": [33]}
    # Negative control: it was as large all the time.
    assert raised_in([{"actor/approx_kl": 0.05}] * 60) == {}


def test_an_entropy_that_was_low_from_the_start_is_no_collapse() -> None:
    """A model may be sure of its answers: what counts is how much was lost."""
    assert raised_in([{"actor/entropy": 0.02}] * 60) == {}


def test_turns_are_counted_by_their_size() -> None:
    """Up and down by 1 each: three turns; ripples of a tenth on the way are none."""
    values = np.asarray([0, 0.5, 1, 0.9, 1, 0.5, 0, 0.1, 0, 1, 0])
    assert turns(values, 0.5) == 3
    assert turns(values, 0.05) == 7
    assert turns(values, 2.0) == 0
    assert turns(np.zeros(9), 0.0) == 0


def test_rules_without_their_figure_do_not_apply() -> None:
    """Then there is no value either, not a 0 that would look like good news."""
    assert raised([{"reward/mean": 0.5}]) == {"alarm/reward_oscillation": 0.0, "alarm/reward_collapse": 0.0}


def test_alarms_of_a_run_are_listed_with_when_they_were_raised() -> None:
    """The earliest first; those that were never raised are absent."""
    flags = [{"alarm/truncation": float(n in (5, 7)), "alarm/kl_explosion": float(n == 4)} for n in range(9)]
    records = [{"iteration": n, "metrics": metrics} for n, metrics in enumerate(flags)]
    assert [(alarm.name, alarm.when) for alarm in alarms_of(records)] == [
        ("kl_explosion", "iteration 4"),
        ("truncation", "iterations 5 to 7, raised in 2"),
    ]


def test_the_documentation_lists_every_rule() -> None:
    """And none that does not exist."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = page.partition("\n## Alarms\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [rule.name for rule in (*RULES, *STEP_RULES)]


def test_the_remedies_name_settings_that_exist() -> None:
    """Each key in a sentence is one of the configuration's."""
    keys = {key.name for key in describe_keys()}
    sections = {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
    for rule in RULES:
        named = re.findall(r"\b(?:actor|algorithm|rollout|reward|data)\.[a-z_.]*[a-z]", rule.change)
        assert named
        assert all(name in keys | sections for name in named), rule.name


@pytest.mark.parametrize("seed", range(3))
def test_what_is_looked_at_is_enough(seed: int) -> None:
    """Troubles come and go at random: a history that forgets as it goes raises what the whole one raises.

    Control: the newest rows alone raise something else.
    """
    draw = np.random.default_rng(seed)
    history = healthy(400, seed)
    history[50]["heldout/kl"] = 2.0
    for begin in range(20, 400, 40):
        trouble = draw.integers(6)
        for row in history[begin : begin + 15]:
            if trouble == 0:
                row["actor/approx_kl"] = 0.5
            elif trouble == 1:
                row["actor/entropy"] = 0.01
            elif trouble == 2:
                row["rollout/truncated_share"] = 0.9
            elif trouble == 3:
                row["actor/grad_norm"] *= float(draw.choice([1, 20]))
            elif trouble == 4:
                row["mismatch/probability_difference_mean"] = 0.1
            else:
                row["reward/mean"] = float(draw.choice([0.0, 1.0]))
        history[begin]["heldout/kl"] = float(draw.choice([0.5, 2.0, np.nan]))
    kept: list[Any] = []
    differ = False
    for end, row in enumerate(history, 1):
        expected = raised(history[:end])
        assert raised([*kept, row]) == expected
        differ |= raised(history[max(0, end - 30) : end]) != expected
        kept = looked_at([*kept, row])
        assert len(kept) < 40
    assert differ


def test_what_waiting_costs_is_reckoned_from_how_long_prompts_took() -> None:
    """Four of five iterations end with four fifths of their prompts; an evaluation is not made faster."""
    row = {
        "time/iteration_s": 50.0,
        "time/evaluate_s": 10.0,
        "rollout/prompt_s_max": 35.0,
        "rollout/prompt_s_p80": 10.0,
    }
    assert tail_gain(row) == 2.0
    assert tail_gain(row | {"rollout/prompt_s_p80": 35.0}) == 1.0


def test_what_is_carried_over_is_complete_as_fast_as_prompts_are_and_the_longest_allow() -> None:
    """A round takes as long as four fifths of the prompts, and a third of the longest. Control: all alike gain none."""
    row = {"time/iteration_s": 40.0, "rollout/prompt_s_max": 36.0, "rollout/prompt_s_p80": 10.0}
    assert carry_gain(row) == 40 / (4 + 12)
    assert carry_gain(row | {"rollout/prompt_s_p80": 20.0}) == 40 / (4 + 20)
    assert carry_gain(row | {"rollout/prompt_s_p80": 36.0}) == 1


@pytest.mark.parametrize(("rollout_s", "gain"), [(20.0, 2.0), (30.0, 4 / 3), (10.0, 4 / 3), (40.0, 1.0)])
def test_a_rollout_ahead_hides_the_shorter_half(rollout_s: float, gain: float) -> None:
    """Of an iteration of 40 s: the rollout behind all the rest, or the rest behind the rollout."""
    assert ahead_gain({"time/iteration_s": 40.0, "rollout/prompt_s_max": rollout_s}) == pytest.approx(gain)


def test_a_training_that_puts_the_longest_off_is_not_told_to() -> None:
    """Also where its long rounds still take their time. Control: the same figures without."""
    row = {"time/iteration_s": 10.0, "rollout/prompt_s_max": 9.0, "rollout/prompt_s_p80": 1.0}
    assert raised([row] * 5)["alarm/rollout_waits"] == 1.0
    assert raised([row | {"rollout/deferred": 3.0}] * 5)["alarm/rollout_waits"] == 0.0
    assert raised([row] * 4)["alarm/rollout_waits"] == 0.0


def of_losses(values: list[float]) -> History:
    return [{"loss": value, "grad_norm": 1.0, "skipped_steps": 0.0} for value in values]


def test_steps_have_alarms_of_their_own() -> None:
    """Each is raised by what it is about. Control: a training that learns, noisily, raises none."""
    noise = np.random.default_rng(0).normal(0, 0.05, 40)
    learns = of_losses((np.linspace(1.0, 0.2, 40) + noise).tolist())
    quiet = raised(learns, STEP_RULES)
    assert quiet == {"alarm/loss_rises": 0.0, "alarm/gradient_jumps": 0.0, "alarm/steps_skipped": 0.0}
    assert raised(of_losses((np.linspace(0.7, 1.2, 40) + noise).tolist()), STEP_RULES)["alarm/loss_rises"]
    assert not raised(of_losses([0.7] * 20 + [1.2] * 4), STEP_RULES)["alarm/loss_rises"], "too few steps"
    jumps = [{**item, "grad_norm": 9.0 if at in (33, 37) else 1.0} for at, item in enumerate(learns)]
    assert raised(jumps, STEP_RULES)["alarm/gradient_jumps"]
    assert raised([*learns, {**learns[-1], "skipped_steps": 1.0}], STEP_RULES)["alarm/steps_skipped"]
    for after, alarm in ((0.8, 1.0), (0.6, 0.0)):
        assert raised([{"heldout/loss": 0.7}, {"heldout/loss": after}], STEP_RULES) == {"alarm/overfitting": alarm}
    assert raised([{"heldout/loss": 0.7}], STEP_RULES) == {"alarm/overfitting": 0.0}
    (told,) = alarms_of([{"iteration": 4, "metrics": {"alarm/overfitting": 1.0}}])
    assert told.when == "iteration 4"


def test_what_is_forgotten_of_steps_changes_no_alarm() -> None:
    """As above for iterations: the start and the end are what is looked at."""
    rising = of_losses(np.linspace(0.7, 1.2, 200).tolist())
    assert len(looked_at(rising)) < len(rising)
    assert raised(looked_at(rising), STEP_RULES) == raised(rising, STEP_RULES)
    assert raised(rising, STEP_RULES)["alarm/loss_rises"]
