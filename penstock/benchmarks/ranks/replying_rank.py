"""The rank of `penstock bench replies`: it has no model and answers its share of the prompts with random tokens.

Left out: every command but `generate`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from penstock.base.ragged import Ragged
from penstock.engines.commands import message as messages
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.engines.groups.channel import Tell
from penstock.engines.rollout.detokenize import decode

GENERATION_S = 1.0  # the reply is made before it is over, and its sender asleep


class ReplyingRank:
    """Replies GENERATION_S after it was asked, as all ranks of its group do."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        self.rank, self.world_size = rank, world_size

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Answer `generate`."""
        began = time.perf_counter()
        answered = self._answered(messages.decode(Generate, arguments, command))
        time.sleep(max(0.0, began + GENERATION_S - time.perf_counter()))
        seconds = time.perf_counter() - began
        seconds_B = np.full(len(answered.responses), seconds, np.float32)
        reply = replace(answered, request_seconds_B=seconds_B, engine_seconds=seconds)
        return {"reply": messages.encode(reply), "usage": {"seconds": seconds}}

    def _answered(self, command: Generate) -> EngineResponses:
        """Return the answers; how long they took is not known yet."""
        sampling, tokenizer = command.sampling, _tokenizer(command.tokenizer)
        positions = np.arange(len(command.prompts))[self.rank :: self.world_size]
        rows, length = len(positions) * sampling.samples, sampling.max_tokens
        generator = np.random.default_rng([*sampling.seed, self.rank])
        drawn = generator.integers(0, len(tokenizer), rows * length, np.int32)
        responses = Ragged(drawn, np.arange(rows + 1) * length)
        return EngineResponses(
            positions_P=positions,
            responses=responses,
            logprobs_T=None,
            truncated_B=np.ones(rows, bool),
            texts=pa.array(decode(tokenizer, responses), pa.large_string()),
            policy_version=0,
            first_version_B=np.zeros(rows, np.int64),
            last_version_B=np.zeros(rows, np.int64),
            request_seconds_B=np.zeros(rows, np.float32),
            engine_seconds=0.0,
            wake_seconds=0.0,
            prompt_tokens=int(command.prompts.offsets_B1[-1]),
            cached_tokens=0,
        )

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


@cache
def _tokenizer(folder: str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
