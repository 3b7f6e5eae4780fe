"""Rollout ranks without a model, for what tasks make of replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from engines.commands.message import decode, encode
from engines.commands.rollout import EngineResponses, Generate, Sampling
from penstock.base.ragged import Ragged

GREEDY = Sampling(samples=1, temperature=0.0, top_p=1.0, top_k=0, max_tokens=2, ignore_eos=False, seed=[0, 1, 0])

NOTHING = EngineResponses(
    positions_P=np.empty(0, np.int64),
    responses=Ragged(np.empty(0, np.int32), np.zeros(1, np.int64)),
    logprobs_T=None,
    truncated_B=np.empty(0, bool),
    texts=pa.array([], pa.large_string()),
    policy_version=0,
    first_version_B=np.empty(0, np.int64),
    last_version_B=np.empty(0, np.int64),
    request_seconds_B=np.empty(0, np.float32),
    engine_seconds=0.0,
    wake_seconds=0.0,
    prompt_tokens=0,
    cached_tokens=0,
)


@dataclass(eq=False)
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
        fields = {name: value for name, value in arguments.items() if name != "on_news"}
        asked = decode(Generate, fields, command)
        taken = np.random.default_rng(self.ranks).permutation(len(asked.prompts))
        answers = [self.answer(asked, taken[rank :: self.ranks]) for rank in range(self.ranks)]
        return [{"reply": encode(answer), "usage": {}} for answer in answers]

    def answer(self, asked: Generate, positions: np.ndarray) -> EngineResponses:
        first = [int(asked.prompts.row(position)[0]) for position in positions]
        tokens = [[token] * (n + 1) for token in first for n in range(asked.sampling.samples)]
        responses, count = Ragged.of(tokens, np.int32), len(tokens)
        return EngineResponses(
            positions_P=positions,
            responses=responses,
            logprobs_T=None,
            truncated_B=np.arange(count) % 2 == 1,
            texts=pa.array([str(responses.row(row)[0]) for row in range(count)], pa.large_string()),
            policy_version=self.policy_version,
            first_version_B=np.full(count, self.policy_version),
            last_version_B=np.full(count, self.policy_version),
            request_seconds_B=np.ones(count, np.float32),
            engine_seconds=1.0,
            wake_seconds=0.25,
            prompt_tokens=1,
            cached_tokens=0,
        )
