"""The work that is measured: prompts, lengths, and experience files that look like a rollout's.

The prompts are those that the peers are measured with: 1,024 rows of 256 lower-case letters from Python's generator
with seed 0, one letter after the other. With a tokenizer of one token per byte (make_model.py) a row has 256 tokens.
Left out: starting anything (session.py).
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.schema import TrainConfig
from penstock.base.files import write_text
from penstock.base.ragged import Ragged, offsets_of
from penstock.state.experience import ExperienceRef, write_columns

PROMPTS, PROMPT_TOKENS, HELDOUT = 1024, 256, 8
SIGMA = 1.0  # of log-normal lengths: one response in six is longer than 1.6 times the mean
UNVERIFIED = -1  # the policy version of a group without a rollout engine


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


@dataclass(frozen=True)
class Lengths:
    """Tokens per row (`_B`) of prompts and responses."""

    kind: str
    prompts_B: np.ndarray
    responses_B: np.ndarray

    @property
    def tokens(self) -> int:
        """All tokens."""
        return int(self.prompts_B.sum() + self.responses_B.sum())

    def describe(self) -> dict[str, float | str]:
        """Return what a result file says about them."""
        return {
            "lengths": self.kind,
            "rows": len(self.responses_B),
            "tokens": self.tokens,
            "prompt_tokens": int(self.prompts_B[0]),
            "response_tokens_mean": float(self.responses_B.mean()),
            "response_tokens_max": int(self.responses_B.max()),
        }


def fixed_lengths(rows: int, prompt: int, response: int) -> Lengths:
    """Return equal lengths."""
    return Lengths("fixed", np.full(rows, prompt), np.full(rows, response))


def lognormal_lengths(rows: int, prompt: int, mean: float, longest: int) -> Lengths:
    """Return log-normal response lengths as a reasoning model's: many short ones, a few that are cut at `longest`.

    `mean` is that of the distribution before the cut. The draws are the same every time.
    """
    drawn_B = np.random.default_rng(0).lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, rows)
    return Lengths("lognormal", np.full(rows, prompt), np.clip(np.rint(drawn_B), 1, longest).astype(np.int64))


def write_experience(path: Path, lengths: Lengths, vocabulary: int, policy_version: int, samples: int) -> ExperienceRef:
    """Write random tokens with one random advantage per row, and values and returns for a critic.

    As in a rollout, `samples` rows one after the other answer the same prompt: an update computes it once for them.
    """
    generator = np.random.default_rng(1)
    offsets_B1 = offsets_of(lengths.responses_B)
    total = int(offsets_B1[-1])
    advantages_B = generator.standard_normal(len(lengths.responses_B)).astype(np.float32)

    group_B = np.arange(len(lengths.prompts_B)) // samples

    def tokens(lengths_B: np.ndarray) -> Ragged:
        return Ragged(generator.integers(0, vocabulary, int(lengths_B.sum()), np.int32), offsets_of(lengths_B))

    def noise() -> Ragged:
        return Ragged(generator.standard_normal(total, np.float32), offsets_B1)

    write_columns(
        path,
        {
            "prompt_tokens": tokens(lengths.prompts_B[::samples]).take(group_B),
            "response_tokens": tokens(lengths.responses_B),
            "loss_mask": Ragged(np.ones(total, np.uint8), offsets_B1),
            "advantages": Ragged(np.repeat(advantages_B, lengths.responses_B), offsets_B1),
            "values": noise(),
            "returns": noise(),
            "policy_version": np.full(len(lengths.responses_B), policy_version),
        },
    )
    prompt_tokens = int(lengths.prompts_B.sum())
    return ExperienceRef(str(path), len(lengths.responses_B), prompt_tokens, total, policy_version)
