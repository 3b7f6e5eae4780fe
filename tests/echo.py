"""Rollout ranks without a model, for what tasks make of replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.base.ragged import Ragged


@dataclass
class Echo:
    """Ranks that answer a prompt with its first token, once for sample 0, twice for sample 1."""

    ranks: int
    policy_version: int = 3
    commands: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(devices=(None,) * self.ranks)

    def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        self.commands.append({"command": command, "key": key, **arguments})
        prompts = Ragged(arguments["prompts"], arguments["offsets"])
        taken = np.random.default_rng(self.ranks).permutation(len(prompts))
        return [self.answer(prompts, taken[rank :: self.ranks], arguments["sampling"]) for rank in range(self.ranks)]

    def answer(self, prompts: Ragged, positions: np.ndarray, sampling: dict[str, Any]) -> dict[str, Any]:
        first = [int(prompts.row(position)[0]) for position in positions]
        responses = Ragged.of([[token] * (n + 1) for token in first for n in range(sampling["samples"])], np.int32)
        count = len(responses)
        return {
            "usage": {},
            "positions": positions,
            "tokens": responses.values_T,
            "offsets": responses.offsets_B1,
            "truncated": np.arange(count) % 2 == 1,
            "texts": pa.array([str(responses.row(row)[0]) for row in range(count)], pa.large_string()),
            "policy_version": self.policy_version,
            "request_seconds": np.ones(count, np.float32),
            "engine_seconds": 1.0,
            "wake_seconds": 0.25,
            "prompt_tokens": 1,
            "cached_tokens": 0,
        }
