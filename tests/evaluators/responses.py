"""Held-out responses as evaluators see them, made from lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.base.ragged import Ragged
from penstock.evaluators.heldout import HeldOut


def heldout(
    rewards: Sequence[float],
    samples: int = 1,
    texts: Sequence[str] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    truncated: Sequence[bool] | None = None,
) -> HeldOut:
    """Return responses with these rewards; what is not given is the same for all."""
    rows = len(rewards)
    return HeldOut(
        samples=samples,
        prompt_ids=[f"heldout-{row // samples:06d}" for row in range(rows)],
        prompts=[f"prompt {row // samples}" for row in range(rows)],
        rows=[{"answer": str(row // samples)} for row in range(rows)],
        texts=list(texts) if texts is not None else ["text"] * rows,
        tokens=Ragged.of(tokens if tokens is not None else [[1, 2, 3]] * rows, np.int32),
        rewards_B=np.asarray(rewards, np.float64),
        truncated_B=np.asarray(truncated if truncated is not None else [False] * rows),
    )
