"""The rank of `penstock bench replies`: it has no model and answers its share of the prompts with random tokens.

Left out: every command but `generate`.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

from engines.groups.channel import Tell
from engines.rollout.detokenize import decode
from penstock.base.ragged import Ragged

GENERATION_S = 1.0  # the reply is made before it is over, and its sender asleep


class ReplyingRank:
    """Replies GENERATION_S after it was asked, as all ranks of its group do."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        self.rank, self.world_size = rank, world_size

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Answer `generate`."""
        began = time.perf_counter()
        reply = self._answered(**arguments)
        time.sleep(max(0.0, began + GENERATION_S - time.perf_counter()))
        seconds = time.perf_counter() - began
        reply["request_seconds"] = np.full(len(reply["truncated"]), seconds, np.float32)
        return {**reply, "engine_seconds": seconds, "usage": {"seconds": seconds}}

    def _answered(self, offsets: np.ndarray, sampling: dict[str, Any], tokenizer: str, **_: Any) -> dict[str, Any]:
        positions = np.arange(len(offsets) - 1)[self.rank :: self.world_size]
        rows, length = len(positions) * sampling["samples"], sampling["max_tokens"]
        generator = np.random.default_rng([*sampling["seed"], self.rank])
        drawn = generator.integers(0, len(_tokenizer(tokenizer)), rows * length, np.int32)
        responses = Ragged(drawn, np.arange(rows + 1) * length)
        return {
            "positions": positions,
            "tokens": responses.values_T,
            "offsets": responses.offsets_B1,
            "truncated": np.ones(rows, bool),
            "texts": pa.array(decode(_tokenizer(tokenizer), responses), pa.large_string()),
            "policy_version": 0,
            "wake_seconds": 0.0,
            "prompt_tokens": int(offsets[-1]),
            "cached_tokens": 0,
        }

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


@cache
def _tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
