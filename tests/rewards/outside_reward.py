"""A reward function whose module reads what a sandbox hides."""

from __future__ import annotations

import os
from pathlib import Path

WORDS = Path(os.environ["PENSTOCK_TEST_PLACE"]).read_text().split()


def score(response: str) -> float:
    """Return whether the response is one of the words."""
    return float(response in WORDS)
