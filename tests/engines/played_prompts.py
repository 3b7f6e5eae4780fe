"""A table of prompts from which `Playground` plays: with the column `kind` that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from penstock.base.ragged import Ragged
from penstock.data.prompts import PromptTable


def save_prompts(path: Path, prompts: Ragged, kinds: Sequence[str]) -> str:
    """Write the table, of prompts with the given tokens; return its path."""
    frame = {
        "prompt_id": [f"train-{number:06d}" for number in range(len(kinds))],
        "prompt_text": ["-"] * len(kinds),
        "prompt_tokens": [prompts.row(number) for number in range(len(kinds))],
        "kind": list(kinds),
    }
    PromptTable(pd.DataFrame(frame), 0).save(path)
    return str(path)
