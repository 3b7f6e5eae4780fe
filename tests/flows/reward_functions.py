"""Reward functions for tests of whole trainings; worker processes import this module from the working directory.

All take the answer's `suffix`, which configs/quickstart.yaml sets for its own function.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

HOLD = "PENSTOCK_TEST_HOLD"  # names a file: while it exists, scoring waits
BREAK = "PENSTOCK_TEST_BREAK"  # names a file: once it exists, scoring fails


def low_digit(response: str, suffix: str) -> float:
    """1 for about half of what an untrained policy says, so that there is something to learn at once."""
    while _exists(HOLD):
        time.sleep(0.02)
    if _exists(BREAK):
        raise LookupError("this reward function is broken")
    return float(response[2:3] in ("0", "1", "2", "3", "4"))


def constant(response: str, suffix: str) -> float:
    """The same for every response: nothing can be learned from it."""
    if _exists(BREAK):
        raise LookupError("this reward function is broken")
    return 0.5


def _exists(variable: str) -> bool:
    return Path(os.environ[variable]).exists() if variable in os.environ else False


def low_digits(response: str, suffix: str) -> dict[str, float]:
    """The share of low digits in a response: something to learn from each; with a part beside it."""
    length = max(1, len(response))
    low, zeros = (sum(character in wanted for character in response) / length for wanted in ("01234", "0"))
    return {"reward": low, "low": low, "zeros": zeros}
