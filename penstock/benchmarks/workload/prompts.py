"""The prompts that are measured, the same ones for Penstock and its peers.

They are 1,024 rows of 256 lower-case letters from Python's generator with seed 0, one letter after the other. With a
tokenizer of one token per byte (make_model.py) a row has 256 tokens. Of a recipe with arithmetic they are its own
problems, with their answers, in the order in which its training takes them. Left out: recipes that name files.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.configs.schema import TrainConfig
from penstock.data.samplers import sequential, shuffled
from penstock.data.source import split_of

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
        write_rows(path, as_rows(texts))
    return {key: str(path) for key, (path, _) in files.items()}


def as_rows(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return prompts without answers as rows of a file."""
    return [{"prompt": text} for text in texts]


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write rows as JSONL; folders that are missing are made."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def problems_of(config: TrainConfig) -> dict[str, list[dict[str, str]]]:
    """Return the problems of a recipe with arithmetic, `prompt` and `answer`: `train` and `heldout`.

    `train` has those of all iterations, one iteration's after the other's, so that a peer that takes them in the order
    of the file answers the prompts of each iteration. `heldout` are those that the recipe evaluates.

    Raises:
        UserError: the recipe has no arithmetic, or which prompts it takes depends on more than its seed.
    """
    data, rollout = config.data, config.rollout
    if data.arithmetic is None:
        raise UserError("the recipe has no 'data.arithmetic'", "give the peers its files as they are")
    orders: dict[str, Callable[..., np.ndarray]] = {"shuffled": shuffled, "sequential": sequential}
    if data.sampler.name not in orders or config.algorithm.dynamic_sampling or rollout.tail or rollout.goes_on:
        raise UserError(
            "which prompts this recipe takes follows from what is sampled",
            "leave out 'data.sampler', 'algorithm.dynamic_sampling' and the modes of 'rollout' that put prompts off",
        )
    train, heldout = split_of(config, "train"), split_of(config, "heldout")
    count = config.iterations * rollout.prompts
    taken = orders[data.sampler.name](table=train, count=count, cursor=0, seed=config.seed)
    splits = {"train": train.iloc[taken], "heldout": heldout[: config.evaluate.prompts or None]}
    return {split: _with_answers(frame) for split, frame in splits.items()}


def _with_answers(frame: pd.DataFrame) -> list[dict[str, str]]:
    pairs = zip(frame["prompt"], frame["answer"], strict=True)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def with_prompts(config: TrainConfig, folder: Path) -> list[str]:
    """Return overrides that give a recipe without data the benchmark's prompts; none for a recipe that names its own.

    A prompt has `data.max_prompt_tokens` letters, and there are enough for an iteration without a repetition.
    """
    if config.data.arithmetic is not None or config.data.train is not None:
        return []
    files = write_prompts(folder, config.data.max_prompt_tokens, max(PROMPTS, config.rollout.prompts))
    return [f"{key}={json.dumps(path)}" for key, path in files.items()]
