"""Sends prompts to the rollout ranks and collects their responses; used by rollout and evaluate. Not a task itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from state.experience import Ragged, offsets_of
from tasks.session import Training


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, `samples` rows per prompt in prompt order."""

    tokens: Ragged
    texts: list[str]
    truncated_B: np.ndarray
    policy_version: int


def generate(
    training: Training, prompts: pd.DataFrame, key: str, seed: list[int], sampling: dict[str, Any]
) -> Responses:
    """Generate responses; every rank takes a contiguous share of the prompts, so a prompt's samples stay together.

    Args:
        prompts: rows of a prompt table.
        key: idempotency key of the command.
        seed: three numbers that make this generation's random draws unique; each rank adds its own. (NumPy fills
            shorter seeds up with zeros: of another length, they could equal another generation's.)
        sampling: fields of `engines.generator.Sampling` without the seed.
    """
    session = training.session()
    group = session.groups["rollout"]
    shares = np.array_split(np.arange(len(prompts)), len(group.spec.devices))
    per_rank = []
    for rank, share in enumerate(shares):
        tokens = Ragged.of([prompts["prompt_tokens"].iloc[row] for row in share], np.int32)
        state = int(np.random.SeedSequence([*seed, rank]).generate_state(1)[0])
        per_rank.append(
            {"prompts": tokens.values_T, "offsets": tokens.offsets_B1, "sampling": {**sampling, "seed": state}}
        )
    replies = group.call("generate", key=key, per_rank=per_rank, tokenizer=session.model_folder)
    lengths = np.concatenate([np.diff(reply["offsets"]) for reply in replies])
    return Responses(
        tokens=Ragged(np.concatenate([reply["tokens"] for reply in replies]), offsets_of(lengths)),
        texts=[text for reply in replies for text in reply["texts"]],
        truncated_B=np.concatenate([reply["truncated"] for reply in replies]),
        policy_version=int(replies[0]["policy_version"]),
    )
