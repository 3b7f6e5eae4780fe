"""Reward functions for the usual verifiable tasks: an exact answer, a number, a pattern.

They are ordinary reward functions (penstock/rewards/function.py says what those receive) and so also examples of one.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?"  # a minus is a sign unless it stands between operands: 10-4
    r"\$?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)


def exact_match(response: str, answer: object, suffix: str = "") -> float:
    """1 if the response is the answer followed by `suffix`, else 0; white space around either does not count."""
    return float(response.strip() == str(answer).strip() + suffix)


def last_number(response: str, answer: object) -> float:
    """1 if the response ends in the number of the answer, else 0 (GSM8K; Cobbe et al. 2021, arXiv:2110.14168).

    In both texts the number is the first after the last `####`, or without one the last of the text; `$`, thousands
    commas and a full stop after it do not count, and 18 equals 18.0. Fractions and exponents are not read.

    Raises:
        ValueError: the answer has no number (the wrong column, perhaps).
    """
    expected = _final_number(str(answer))
    if expected is None:
        raise ValueError(f"no number in the answer {str(answer)[-80:]!r}")
    return float(_final_number(response) == expected)


def matches_regex(response: str, pattern: str) -> float:
    """1 if the whole response matches `pattern` (`re.fullmatch`, where `.` also matches a newline), else 0."""
    return float(_compiled(pattern).fullmatch(response) is not None)


def _final_number(text: str) -> Decimal | None:
    _, marker, after = text.rpartition("####")
    numbers = list(_NUMBER.finditer(after))
    if not numbers:
        return None
    found = numbers[0 if marker else -1]
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] else value


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
