"""Which runs are one group, their means and totals, and how groups differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.base.errors import UserError
from penstock.reports.comparing.groups import contrasts, grouped
from penstock.reports.comparing.tables import comparison_of, contrast_numbers, group_numbers, group_table
from tests.reports.comparing.examples import RATE, run, two_groups


def test_runs_that_differ_in_their_seed_and_name_alone_are_one_group() -> None:
    """Named by what tells the groups apart. Control: one more setting that differs makes another group."""
    runs = two_groups()
    groups = grouped(runs)
    assert [(group.label, len(group.runs), dict(group.differing)) for group in groups] == [
        ("A", 3, {RATE: "1e-06"}),
        ("B", 3, {RATE: "3e-06"}),
    ]
    assert groups[1].title == f"B: {RATE}=3e-06"
    other = replace(runs[0], settings={**runs[0].settings, "rollout.samples": "4"})
    assert [len(group.runs) for group in grouped([other, *runs[1:]])] == [1, 2, 3]


def test_a_group_has_its_mean_interval_and_totals() -> None:
    """Of 0.57, 0.66, 0.78 by hand: mean 0.67, deviation 0.10536, reach 4.30265 * 0.10536 / √3. The best was the last.

    Six runs of half an hour on four GPUs are two hours of a GPU each.
    """
    slow, fast = grouped(two_groups())
    mean = slow.mean("heldout/accuracy")
    assert mean is not None
    reach = 4.30265 * 0.105357 / math.sqrt(3)
    assert (mean.value, mean.low, mean.high, mean.runs) == pytest.approx(
        (0.67, 0.67 - reach, 0.67 + reach, 3), rel=1e-5
    )
    best = fast.mean("heldout/accuracy best")
    assert best is not None and best.value == pytest.approx(0.9)
    assert [slow.total(total) for total in ("GPU hours", "tokens generated", "tokens trained")] == [6.0, 600.0, 1200.0]
    numbers = group_numbers([slow, fast])
    assert numbers.loc["A", "heldout/accuracy low"] == pytest.approx(0.67 - reach, rel=1e-5)
    assert numbers.loc["B", "GPU hours"] == 6.0
    text = group_table([slow, fast])
    assert text.loc["A", "held-out accuracy, last"] == "0.670 (0.408 to 0.932)"
    assert text.loc["A", "tokens per second"] == "50.000 (50.000 to 50.000)"


def test_tokens_that_no_batch_used_were_generated_too() -> None:
    """A fifth of them was dropped. Control: without the figure all were used."""
    one = run("one", "1e-06", 0, (0.1, 0.2, 0.3))
    assert one.outcome["tokens generated"] == 200.0
    carried = replace(one, histories={**one.histories, "rollout/unused_share": {1: 0.2, 2: 0.0}})
    assert carried.outcome["tokens generated"] == pytest.approx(225.0)


def test_a_run_that_did_not_come_to_its_end_is_in_no_mean_and_in_the_totals() -> None:
    """What it has used nobody knows, so neither does the total. Control: the other group's is known."""
    runs = two_groups()
    broken = run("slow-3", "1e-06", 3, (0.3, 0.0), completed=False)
    broken = replace(broken, settings=runs[0].settings | {"seed": "3", "name": "slow-3"})
    slow, fast = grouped([*runs, broken])
    mean = slow.mean("heldout/accuracy")
    assert mean is not None and (mean.value, mean.runs) == (pytest.approx(0.67), 3)
    assert group_table([slow, fast]).loc["A", "runs"] == "3 of 4"
    assert math.isnan(slow.total("GPU hours")) and fast.total("GPU hours") == 6.0


def test_groups_are_told_apart_by_the_paired_test() -> None:
    """As test_statistics.py has it, in every figure of which both groups have several. Control: against the other."""
    slow, fast = grouped(two_groups())
    found = {item.measure: item for item in contrasts([slow, fast], slow)}
    last = found["heldout/accuracy"]
    assert (last.group, last.against) == ("B", "A")
    assert last.difference.mean == pytest.approx(0.03)
    assert last.difference.p == pytest.approx(0.0351, abs=1e-4)
    assert math.isnan(found["s/iteration"].difference.p)
    turned = {item.measure: item for item in contrasts([slow, fast], fast)}["heldout/accuracy"]
    assert (turned.group, turned.against, turned.difference.mean) == ("A", "B", pytest.approx(-0.03))
    assert contrast_numbers([last]).iloc[0]["test"] == "paired t-test, 3 seeds"


def test_what_the_others_are_compared_with_can_be_named() -> None:
    """By a run of the group. Control: the first one; a name of no run is refused."""
    runs = two_groups()
    assert {item.against for item in comparison_of(runs).contrasts} == {"A"}
    assert {item.against for item in comparison_of(runs, "fast-1").contrasts} == {"B"}
    with pytest.raises(UserError, match=r"'fsat-1' is not among(.|\n)*slow-0, "):
        comparison_of(runs, "fsat-1")


def test_more_groups_than_letters_have_labels_of_their_own() -> None:
    """A to Z, then AA. Control: all labels differ."""
    groups = grouped([run(f"run-{number}", f"{number}e-06", 0, (0.1, 0.2)) for number in range(1, 31)])
    assert [groups[0].label, groups[25].label, groups[26].label] == ["A", "Z", "AA"]
    assert len({group.label for group in groups}) == 30
