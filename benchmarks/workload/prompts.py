"""The prompts that are measured, the same ones for Penstock and its peers.

They are 1,024 rows of 256 lower-case letters from Python's generator with seed 0, one letter after the other. With a
tokenizer of one token per byte (make_model.py) a row has 256 tokens. Left out: recipes that name data of their own.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path

from configs.schema import TrainConfig
from penstock.base.files import write_text

PROMPTS, PROMPT_TOKENS, HELDOUT = 1024, 256, 8


def prompts(count: int = PROMPTS, letters: int = PROMPT_TOKENS) -> list[str]:
    """Return `count` prompts of `letters` random lower-case letters, the same ones every time."""
    generator = random.Random(0)
    return ["".join(generator.choice(string.ascii_lowercase) for _ in range(letters)) for _ in range(count)]


def write_prompts(folder: Path, letters: int, count: int = PROMPTS) -> dict[str, str]:
    """Write the prompts as JSONL, and a few more as held-out ones; return `data.train` and `data.heldout`."""
    rows = prompts(count + HELDOUT, letters)
    files = {
        "data.train": (folder / "train.jsonl", rows[:count]),
        "data.heldout": (folder / "heldout.jsonl", rows[count:]),
    }
    for path, texts in files.values():
        write_rows(path, texts)
    return {key: str(path) for key, (path, _) in files.items()}


def write_rows(path: Path, texts: Sequence[str]) -> None:
    """Write prompts as JSONL; folders that are missing are made."""
    write_text(path, "".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def with_prompts(config: TrainConfig, folder: Path) -> list[str]:
    """Return overrides that give a recipe without data the benchmark's prompts; none for a recipe that names its own.

    A prompt has `data.max_prompt_tokens` letters, and there are enough for an iteration without a repetition.
    """
    if config.data.arithmetic is not None or config.data.train is not None:
        return []
    files = write_prompts(folder, config.data.max_prompt_tokens, max(PROMPTS, config.rollout.prompts))
    return [f"{key}={json.dumps(path)}" for key, path in files.items()]
