"""Reward functions for tests of whole trainings; worker processes import this module from the working directory.

All take the answer's `suffix`, which configs/quickstart.yaml sets for its own function.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

HOLD = "PENSTOCK_TEST_HOLD"  # a file: while it exists and the variable is set, scoring waits


def low_digit(response: str, suffix: str) -> float:
    """1 for half of what an untrained policy says, so that every update moves the weights; waits where told to."""
    while (held := os.environ.get(HOLD)) and Path(held).exists():
        time.sleep(0.02)
    return float(response[2:3] in ("0", "1", "2", "3", "4"))


def constant(response: str, suffix: str) -> float:
    """Nothing can be learned from it."""
    return 0.5


def broken(response: str, suffix: str) -> float:
    raise LookupError("this reward function is broken")
