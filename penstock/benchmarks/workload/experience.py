"""Made-up experience to measure an update with: lengths, and experience files that look like a rollout's.

Left out: the prompts of a rollout (prompts.py), starting anything (penstock/benchmarks/session.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged, offsets_of
from penstock.configs.schema import TrainConfig
from penstock.state.experience import ExperienceRef, write_columns

LOGNORMAL = re.compile(r"lognormal:([1-9]\d*):([1-9]\d*)")
BRANCHED = re.compile(r"branched:([1-9]\d?)")
SIGMA = 1.0  # of log-normal lengths: one response in six is longer than 1.6 times the mean
UNVERIFIED = -1  # the policy version of a group without a rollout engine


@dataclass(frozen=True)
class Lengths:
    """Tokens per row (`_B`) of prompts and responses, and with how many tokens the responses to a prompt all begin."""

    kind: str
    prompts_B: np.ndarray
    responses_B: np.ndarray
    trunk: int = 0

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
            **({"trunk_tokens": self.trunk} if self.trunk else {}),
        }


def lengths_named(name: str, config: TrainConfig) -> Lengths:
    """Return the lengths of a recipe's rows: `fixed`, the longest that it allows, or `lognormal:MEAN:LONGEST`.

    `branched:PERCENT` are fixed ones, of which so much is the same in all responses to a prompt.

    Raises:
        UserError: `name` is neither.
    """
    rows, prompt = config.rollout.prompts * config.rollout.samples, config.data.max_prompt_tokens
    if name == "fixed":
        return fixed_lengths(rows, prompt, config.rollout.max_response_tokens)
    if found := LOGNORMAL.fullmatch(name):
        return lognormal_lengths(rows, prompt, mean=int(found[1]), longest=int(found[2]))
    if found := BRANCHED.fullmatch(name):
        lengths = fixed_lengths(rows, prompt, config.rollout.max_response_tokens)
        return replace(lengths, kind="branched", trunk=int(found[1]) * config.rollout.max_response_tokens // 100)
    raise UserError(
        f"--lengths is '{name}'",
        "say fixed, branched:PERCENT or lognormal:MEAN:LONGEST, for example branched:50 or lognormal:600:4096",
    )


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

    def branched(responses: Ragged) -> Ragged:
        """Let the responses to a prompt begin as the first of them does."""
        tokens_T = responses.values_T
        for row in range(len(responses)) if lengths.trunk else ():
            start, first = responses.offsets_B1[row], responses.offsets_B1[row - row % samples]
            tokens_T[start : start + lengths.trunk] = tokens_T[first : first + lengths.trunk]
        return responses

    group_B = np.arange(len(lengths.prompts_B)) // samples

    def tokens(lengths_B: np.ndarray) -> Ragged:
        return Ragged(generator.integers(0, vocabulary, int(lengths_B.sum()), np.int32), offsets_of(lengths_B))

    def noise() -> Ragged:
        return Ragged(generator.standard_normal(total, np.float32), offsets_B1)

    write_columns(
        path,
        {
            "prompt_tokens": tokens(lengths.prompts_B[::samples]).take(group_B),
            "response_tokens": branched(tokens(lengths.responses_B)),
            "loss_mask": Ragged(np.ones(total, np.uint8), offsets_B1),
            "advantages": Ragged(np.repeat(advantages_B, lengths.responses_B), offsets_B1),
            "values": noise(),
            "returns": noise(),
            "policy_version": np.full(len(lengths.responses_B), policy_version),
        },
    )
    prompt_tokens = int(lengths.prompts_B.sum())
    return ExperienceRef(str(path), len(lengths.responses_B), prompt_tokens, total, policy_version)
