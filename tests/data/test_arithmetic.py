"""Addition problems: right answers, and held-out problems that were never trained on."""

from __future__ import annotations

import itertools
import re

import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems


def _prompts(frame: pd.DataFrame) -> set[str]:
    prompts = set(frame["prompt"])
    assert len(prompts) == len(frame), "a split repeats no problem"
    return prompts


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_answers_are_sums_of_fixed_width(digits: int) -> None:
    """Every row, from its text alone: padded summands, the sum with one digit more, the full stop."""
    config = ArithmeticData(digits=digits, sft=40, train=30, heldout=20)
    splits = make_problems(config, seed=1)
    assert {name: len(frame) for name, frame in splits.items()} == {"sft": 40, "train": 30, "heldout": 20}
    for row in pd.concat(splits.values()).itertuples():
        match = re.fullmatch(rf"(\d{{{digits}}})\+(\d{{{digits}}})=", row.prompt)
        assert match is not None
        assert len(row.answer) == digits + 1
        assert int(row.answer) == int(match[1]) + int(match[2])
        assert row.response == f"{row.answer}."
        digits_of = [sum(map(int, pair)) for pair in zip(reversed(match[1]), reversed(match[2]), strict=True)]
        # Each carry takes ten from a place and gives one to the next: the sum of digits falls by 9.
        assert row.carries == (sum(digits_of) - sum(map(int, row.answer))) / 9
        assert set(row.prompt + row.response) <= set("0123456789+=.")


def test_the_default_splits_are_disjoint() -> None:
    """4,000 + 4,000 + 1,000 of 10,000 ordered pairs: no two splits share a problem."""
    splits = make_problems(ArithmeticData(), seed=0)
    for one, other in itertools.combinations(splits.values(), 2):
        assert _prompts(one).isdisjoint(_prompts(other))


@pytest.mark.parametrize("seed", range(5))
def test_held_out_problems_stay_apart_where_training_has_to_overlap(seed: int) -> None:
    """100 problems, 10 held out, 60 and 60 for training: those share exactly the 30 that are lacking."""
    splits = make_problems(ArithmeticData(digits=1, sft=60, train=60, heldout=10), seed)
    sft, train, heldout = (_prompts(splits[name]) for name in ("sft", "train", "heldout"))
    assert heldout.isdisjoint(sft | train)
    assert len(sft & train) == 30
    assert sft | train | heldout == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_a_careless_teacher_errs_in_one_digit_of_a_share_of_its_answers() -> None:
    """In the warm-up alone: what is rewarded, and what is held out, stays right. Control: without mistakes none."""
    splits = make_problems(ArithmeticData(mistakes=0.3), seed=1)
    right = splits["sft"]["answer"] + "."
    wrong = splits["sft"]["response"] != right
    assert wrong.sum() == round(0.3 * len(wrong))
    for said, answer in zip(splits["sft"]["response"][wrong], right[wrong], strict=True):
        assert sum(one != other for one, other in zip(said, answer, strict=True)) == 1
    for name in ("train", "heldout"):
        assert (splits[name]["response"] == splits[name]["answer"] + ".").all()
    assert (make_problems(ArithmeticData(), seed=1)["sft"]["response"] == right).all()


def test_a_teacher_forgets_carries_in_a_share_of_its_answers() -> None:
    """Each place then holds its own digits' sum; without a carry nothing is wrong. Control: of no share none is."""
    sft = make_problems(ArithmeticData(forgotten_carries=0.6), seed=1)["sft"]
    assert (make_problems(ArithmeticData(), seed=1)["sft"]["response"] == sft["answer"] + ".").all()
    wrong = sft[sft["response"] != sft["answer"] + "."]
    assert (wrong["carries"] > 0).all()
    assert 0.5 < len(wrong) / (sft["carries"] > 0).sum() < 0.7
    for prompt, said in zip(wrong["prompt"], wrong["response"], strict=True):
        assert said == f"0{(int(prompt[0]) + int(prompt[3])) % 10}{(int(prompt[1]) + int(prompt[4])) % 10}."


def test_the_seed_decides() -> None:
    """Same seed, same problems in the same order; another seed, others."""
    config = ArithmeticData()
    first, again, other = make_problems(config, 3), make_problems(config, 3), make_problems(config, 4)
    for name in first:
        pd.testing.assert_frame_equal(first[name], again[name])
        assert first[name]["prompt"].tolist() != other[name]["prompt"].tolist()


def test_asking_for_too_many_names_the_number_available() -> None:
    """The last that fits passes (the control)."""
    make_problems(ArithmeticData(digits=1, sft=90, train=1, heldout=10), 0)
    with pytest.raises(UserError, match="1 digits give 100"):
        make_problems(ArithmeticData(digits=1, sft=91, train=1, heldout=10), 0)
