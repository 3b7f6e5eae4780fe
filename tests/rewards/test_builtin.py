"""The built-in reward functions against cases written out by hand."""

from __future__ import annotations

import re

import pytest

from penstock.rewards.builtin import exact_match, last_number, matches_regex


@pytest.mark.parametrize(
    ("response", "answer", "suffix", "reward"),
    [
        ("Paris", "Paris", "", 1.0),
        (" Paris\n", "Paris ", "", 1.0),
        ("paris", "Paris", "", 0.0),
        ("Paris.", "Paris", "", 0.0),
        ("46", 46, "", 1.0),
        ("046.", "046", ".", 1.0),
        ("046", "046", ".", 0.0),
        ("46.", "046", ".", 0.0),
        ("046.046.", "046", ".", 0.0),
        ("045.", "046", ".", 0.0),
        ("", "046", ".", 0.0),
    ],
)
def test_exact_match(response: str, answer: object, suffix: str, reward: float) -> None:
    """Only white space is forgiven: no case, no partial credit, and the suffix must be there once."""
    assert exact_match(response, answer, suffix) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("She has 3 + 15 = 18", "18", 1.0),
        ("The answer is 18.", "18", 1.0),
        ("18.0", "18", 1.0),
        ("18.5", "18", 0.0),
        ("18", "9 + 9 = <<9+9=18>>18\n#### 18", 1.0),
        ("9", "9 + 9 = <<9+9=18>>18\n#### 18", 0.0),
        ("so #### 18\nchecked in 2 ways", "18", 1.0),
        ("#### 17 no, #### 18", "18", 1.0),
        ("18 ####", "18", 0.0),
        ("#### $1,234.50.", "1234.5", 1.0),
        ("1,234", "1234", 1.0),
        ("1,234,567", "#### 1,234,567", 1.0),
        ("3,18", "18", 1.0),
        ("1,2345", "2345", 1.0),
        ("it costs $18.", 18, 1.0),
        ("-5", "-5", 1.0),
        ("-$5", "-5", 1.0),
        ("$-5", "-5", 1.0),
        ("5", "-5", 0.0),
        ("20-5", "5", 1.0),
        (".5", "0.50", 1.0),
        ("**18**", "18", 1.0),
        (r"\boxed{18}", "18", 1.0),
        ("0", 0.0, 1.0),
        ("eighteen", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_last_number(response: str, answer: object, reward: float) -> None:
    """The number after the last `####`, or the last of the text, compared as a number and not as text."""
    assert last_number(response, answer) == reward


def test_last_number_refuses_an_answer_without_a_number() -> None:
    """A wrong answer column is a failure and not a reward of 0 for everyone."""
    with pytest.raises(ValueError, match="no number in the answer 'eighteen'"):
        last_number("18", "eighteen")


@pytest.mark.parametrize(
    ("response", "pattern", "reward"),
    [
        ("<a>1</a>", r"<a>\d</a>", 1.0),
        ("<a>1</a> ", r"<a>\d</a>", 0.0),
        ("well: <a>1</a>", r"<a>\d</a>", 0.0),
        ("<a>one\ntwo</a>", r"<a>.*</a>", 1.0),
    ],
)
def test_matches_regex(response: str, pattern: str, reward: float) -> None:
    """The whole response must match, line breaks included."""
    assert matches_regex(response, pattern) == reward


def test_matches_regex_refuses_a_bad_pattern() -> None:
    """A pattern that does not compile is a failure and not a reward of 0 for everyone."""
    with pytest.raises(re.error):
        matches_regex("a", "(")
